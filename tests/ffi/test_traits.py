"""What handlers tell XLA of themselves: nothing that lets it record their launches and replay them."""

import ctypes

import pytest

import kvjax

METADATA = 1  # XLA_FFI_Extension_Metadata
pointer, size = ctypes.c_void_p, ctypes.c_size_t


class Version(ctypes.Structure):
    _fields_ = (("struct_size", size), ("extension_start", pointer), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", size),
        ("version", Version),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    )


class Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", size), ("type", ctypes.c_int), ("next", pointer), ("metadata", ctypes.POINTER(Metadata)),
    )  # fmt: skip


class CallFrame(ctypes.Structure):
    """The beginning of XLA_FFI_CallFrame: what comes then (api, context, stage, operands, results, attributes) stays
    zero."""

    _fields_ = (("struct_size", size), ("extension", ctypes.POINTER(Extension)), ("rest", size * (3 + 5 + 5 + 6)))


def metadata_of(handler):
    """What XLA gets when it asks a handler instead of calling it."""
    ctypes.pythonapi.PyCapsule_GetPointer.restype = pointer
    ctypes.pythonapi.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    address = ctypes.pythonapi.PyCapsule_GetPointer(handler, None)
    metadata = Metadata(ctypes.sizeof(Metadata), Version(ctypes.sizeof(Version)), 0xFFFF)
    extension = Extension(ctypes.sizeof(Extension), METADATA, None, ctypes.pointer(metadata))
    frame = CallFrame(ctypes.sizeof(CallFrame), ctypes.pointer(extension))
    assert ctypes.CFUNCTYPE(pointer, ctypes.POINTER(CallFrame))(address)(ctypes.byref(frame)) is None
    return metadata


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_no_handler_may_be_captured(backend):
    """A launch has state of the host in it, as where rows are and how many fit: replayed, it would use memory that has
    been given back. So no handler has the trait for command buffers, nor any other."""
    if not kvjax.ffi.loaded(backend):
        pytest.skip(f"the backend is {kvjax.backends()[backend]}")
    handlers = kvjax.ffi.module(backend).handlers()
    assert len(handlers) > 20
    for name, handler in handlers.items():
        metadata = metadata_of(handler)
        assert (metadata.version.major, metadata.traits) == (0, 0), name
        assert metadata.version.minor > 0, name
