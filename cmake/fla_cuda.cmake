# FLA_CUDA=ON: the compiler, the architectures and the flags of CUDA code, and fla_cuda_runtime, the static runtime that
# opens the driver when it is first used. Needs nvcc and no GPU.

set(FLA_CUDA_ARCHITECTURES "80-real;86-real;89-real;90a-real;100-real;120-real;90-virtual" CACHE STRING
  "GPUs to compile for, as CMAKE_CUDA_ARCHITECTURES takes them; a -virtual one is for GPUs newer than all others")

if(NOT CMAKE_CUDA_COMPILER)
  find_program(FLA_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin PATHS /usr/local/cuda/bin)
  mark_as_advanced(FLA_NVCC)
  if(NOT FLA_NVCC)
    message(FATAL_ERROR "FLA_CUDA=ON needs nvcc (CUDA 12.8 or newer), which is neither in PATH nor in /usr/local/cuda/bin.")
  endif()
  set(CMAKE_CUDA_COMPILER ${FLA_NVCC})
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
set(CMAKE_CUDA_ARCHITECTURES ${FLA_CUDA_ARCHITECTURES})
enable_language(CUDA)
if(FLA_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FLA_CCACHE})
endif()

find_package(CUDAToolkit REQUIRED)
add_library(fla_cuda_runtime INTERFACE)
target_link_libraries(fla_cuda_runtime INTERFACE CUDA::cudart_static)

# CMake 3.25 does not know that nvcc has C++20, so the standard is a flag like others.
set(flags -std=c++20 -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers $<$<BOOL:${FLA_WERROR}>:-Werror=all-warnings>)
target_compile_options(fla_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
