from kvjax.ffi._cpu import *  # noqa: F403
