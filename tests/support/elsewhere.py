"""A second backend, where there is one."""

from kvjax import ffi

# What does not begin with the name of a table.
_NAMELESS = {"HOME", "set_process", "begin_staged", "add_load", "end_load", "commit_load", "ask_failure"}
_NAMELESS |= {"left_failures", "forget_failures"}


class Elsewhere:
    """Stands for the backend of another platform: its tables are those of the host under names that no program knows.

    So all that is Python's part of two backends can be tested where there is one.
    """

    def __getattr__(self, call):
        function = getattr(ffi.host, call)
        if call in _NAMELESS:
            return function

        def there(name, *args, **options):
            args = [arg | {"storage": "host"} if isinstance(arg, dict) and "storage" in arg else arg for arg in args]
            return function(f"{name}, elsewhere", *args, **options)

        return there
