# CUDA with the nvcc that find_cuda.cmake has found, and how kvjax's kernels are compiled.
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100) # newer GPUs than these run the PTX of the last
endif()
set(CMAKE_CUDA_COMPILER "${KVJAX_NVCC}")
set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
kvjax_cudart_folder("${KVJAX_NVCC}" folder)
set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} ${folder}")
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 does not know that nvcc 12 and 13 can
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

# Objects of files for nvcc.
function(kvjax_cuda_objects name)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    CUDA_RUNTIME_LIBRARY Static # loads the driver when it is first called: without one the module still imports
    POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  # Initial rows have the same bits as on the CPU: no fused multiply-add behind our back here either.
  target_compile_options(${name} PRIVATE
    --expt-relaxed-constexpr --extended-lambda -fmad=false --threads=0 "SHELL:-Xcompiler -Wall,-Wextra,-ffp-contract=off")
endfunction()
