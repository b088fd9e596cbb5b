"""Calls into the native tables: every `ffi_call` of kvjax, one function per target."""

from kvjax import ffi

ffi.register()
