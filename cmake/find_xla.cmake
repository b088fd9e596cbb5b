# The headers of XLA's FFI, which jaxlib brings: JAX itself is not needed to build. XLA runs what was built with headers
# as old as its own or older, and refuses what was built with newer ones.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.metadata, importlib.util
print(importlib.util.find_spec("jaxlib").submodule_search_locations[0], importlib.metadata.version("jaxlib"), sep=";")
]]
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE found RESULT_VARIABLE failed ERROR_QUIET)
list(POP_FRONT found XLA_INCLUDE_DIR version)
string(APPEND XLA_INCLUDE_DIR /include)
if(failed OR NOT EXISTS "${XLA_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "kvjax is built with headers that jaxlib brings, and ${Python_EXECUTABLE} has none; "
                      "pip install jaxlib, or leave --no-build-isolation out")
endif()
file(STRINGS "${XLA_INCLUDE_DIR}/xla/ffi/api/c_api.h" lines REGEX "define XLA_FFI_API_M(AJOR|INOR)")
string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
string(REPLACE ";" "." numbers "${numbers}")
message(STATUS "XLA FFI ${numbers}, the headers of jaxlib ${version}: for this jaxlib and newer ones")
