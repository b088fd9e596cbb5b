# The kernels of row programs, once for each instruction set: kvjax/ffi/cpu/program/kernels.h chooses at run time.
set(KVJAX_KERNELS ${CMAKE_SOURCE_DIR}/kvjax/ffi/cpu/program)

# Adds them to a target, made with the compiler's other flags `ARGN`.
function(kvjax_kernels target)
  set(sources ${KVJAX_KERNELS}/baseline.cc)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND sources ${KVJAX_KERNELS}/avx2.cc ${KVJAX_KERNELS}/avx512.cc)
  endif()
  add_library(${target}_kernels OBJECT ${sources})
  # Nobody reads errno or the floating-point flags, which would keep loops from being vectorized.
  target_compile_options(${target}_kernels PRIVATE -O3 -fno-math-errno -fno-trapping-math -fvisibility=hidden ${ARGN})
  set_target_properties(${target}_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${target}_kernels PRIVATE ${CMAKE_SOURCE_DIR})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_kernels>)
  set_source_files_properties(${KVJAX_KERNELS}/avx2.cc PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma")
  set_source_files_properties(${KVJAX_KERNELS}/avx512.cc PROPERTIES COMPILE_OPTIONS
    "-mavx2;-mfma;-mavx512f;-mavx512vl;-mavx512dq;-mavx512bw;-mprefer-vector-width=512")
endfunction()
