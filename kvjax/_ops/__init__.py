"""Calls into the native tables: every `ffi_call` of kvjax, one function per target."""
