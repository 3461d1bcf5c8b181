# How our own code is compiled. Directory-scoped, so a project that adds this one by add_subdirectory or FetchContent
# keeps its own settings.

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release)
  endif()
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    find_program(FLA_CCACHE ccache)
    mark_as_advanced(FLA_CCACHE)
    if(FLA_CCACHE)
      # Without these it does not cache what uses precompiled headers.
      set(CMAKE_CXX_COMPILER_LAUNCHER
        ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${FLA_CCACHE})
    endif()
  endif()
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=mold FLA_HAVE_MOLD)
  if(FLA_HAVE_MOLD AND NOT CMAKE_CROSSCOMPILING)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

set(fla_sanitize ${FLA_SANITIZE})
if(FLA_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "FLA_FUZZ=ON needs clang (libFuzzer), got ${CMAKE_CXX_COMPILER_ID}; use the preset fuzz.")
  endif()
  set(fla_sanitize fuzzer-no-link,address,undefined)
endif()
if(fla_sanitize)
  add_compile_options(-fsanitize=${fla_sanitize} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${fla_sanitize})
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # The kernels are one source for all instruction sets: under a sanitizer one of them is enough, and half the build.
    add_compile_options(-march=haswell -maes -mpclmul)
    add_compile_definitions(HWY_COMPILE_ONLY_STATIC)
  endif()
endif()

add_library(fla_options INTERFACE)
target_compile_features(fla_options INTERFACE cxx_std_20)
set(flags
  # No -march: Highway picks the instruction set at run time. No contraction: which products are fused is written in the
  # source, so vector bodies, scalar tails and every target round alike.
  -ffp-contract=off
  # Designated initialisers name what differs from a member's default; leaving the rest out is the point of them.
  -Wall -Wextra -Wshadow -Wpedantic -Wno-missing-field-initializers
  $<$<BOOL:${FLA_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND flags -Wno-restrict)  # g++ 12 reports std::string's own code
  endif()
  if(fla_sanitize)
    # Instrumentation hides initialisations and bounds from these two.
    list(APPEND flags -Wno-maybe-uninitialized -Wno-stringop-overflow)
  endif()
endif()
target_compile_options(fla_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
if(fla_sanitize OR CMAKE_BUILD_TYPE STREQUAL Debug)
  target_compile_definitions(fla_options INTERFACE _GLIBCXX_ASSERTIONS)
endif()

# For what is built often and never measured: the program around the library, tests, descriptions of operators.
add_library(fla_cold_options INTERFACE)
target_compile_options(fla_cold_options INTERFACE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  target_compile_options(fla_cold_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)  # what ccache asks for
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # At -O1 too it reports std::string's own code.
  target_compile_options(fla_cold_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds;-Wno-stringop-overflow>")
endif()

# fla/fla.h and fla/core/dlpack.h show DLPack's structs.
find_package(dlpack CONFIG QUIET)
if(TARGET dlpack::dlpack)
  get_target_property(fla_dlpack_include dlpack::dlpack INTERFACE_INCLUDE_DIRECTORIES)
endif()

# Includes are written from the repository's root, in the tree and installed alike.
function(fla_include_root target)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${fla_SOURCE_DIR}> $<BUILD_INTERFACE:${fla_BINARY_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  if(fla_dlpack_include)
    target_include_directories(${target} SYSTEM PUBLIC $<BUILD_INTERFACE:${fla_dlpack_include}>)
  endif()
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
endfunction()
