# Sources written during the build: what was built (version.h declares it) and the hash of the frozen files.

# The commit is looked up at every build, but the file and what depends on it change only when the answer does.
function(fla_add_build_info target)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" config)
  set(FLA_BUILD_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  get_directory_property(directory_options COMPILE_OPTIONS)
  string(JOIN " " FLA_BUILD_FLAGS ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${config}} ${directory_options} -ffp-contract=off)
  set(FLA_BUILD_CUDA "")
  if(FLA_CUDA)
    string(JOIN " " FLA_BUILD_CUDA ${FLA_CUDA_ARCHITECTURES})
  elseif(FLA_CUDA_EMULATE)
    set(FLA_BUILD_CUDA emulator)
  endif()
  string(REPLACE "\\" "\\\\" FLA_BUILD_FLAGS "${FLA_BUILD_FLAGS}")
  string(REPLACE "\"" "\\\"" FLA_BUILD_FLAGS "${FLA_BUILD_FLAGS}")
  set(FLA_COMMIT "@FLA_COMMIT@")  # the second step's
  set(template ${fla_BINARY_DIR}/generated/build_info.cc.in)
  set(output ${fla_BINARY_DIR}/generated/build_info.cc)
  configure_file(${fla_SOURCE_DIR}/cmake/build_info.cc.in ${template} @ONLY)
  add_custom_target(fla_build_info BYPRODUCTS ${output}
    COMMAND ${CMAKE_COMMAND} -D ROOT=${fla_SOURCE_DIR} -D TEMPLATE=${template} -D OUTPUT=${output}
            -P ${fla_SOURCE_DIR}/cmake/build_info.cmake
    COMMENT "" VERBATIM)
  set_source_files_properties(${output} PROPERTIES GENERATED ON)
  target_sources(${target} PRIVATE ${output})
  add_dependencies(${target} fla_build_info)
endfunction()

# The frozen files decide whether a kernel is right: nothing that is tuned may change them.
function(fla_add_frozen_hash target)
  set(scope ${fla_SOURCE_DIR}/tools/frozen_scope.txt)  # its head says what a pattern means
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${scope})
  file(STRINGS ${scope} patterns REGEX "^[^#]")
  set(frozen "")
  foreach(pattern IN LISTS patterns)
    if(pattern MATCHES "/\\*\\*$")
      string(REGEX REPLACE "\\*\\*$" "*" pattern ${pattern})
      file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${fla_SOURCE_DIR} ${fla_SOURCE_DIR}/${pattern})
    else()
      string(REPLACE "=" "*" glob ${pattern})
      file(GLOB files CONFIGURE_DEPENDS RELATIVE ${fla_SOURCE_DIR} ${fla_SOURCE_DIR}/${glob})
      if(pattern MATCHES "/=[.]")
        list(FILTER files INCLUDE REGEX "/([^/]+)/\\1[.][^/]*$")
      endif()
    endif()
    list(APPEND frozen ${files})
  endforeach()
  list(REMOVE_DUPLICATES frozen)
  list(SORT frozen)
  string(JOIN "\n" text ${frozen})
  set(list ${fla_BINARY_DIR}/generated/frozen.txt)
  set(output ${fla_BINARY_DIR}/generated/frozen.cc)
  file(CONFIGURE OUTPUT ${list} CONTENT "${text}\n" @ONLY)
  list(TRANSFORM frozen PREPEND ${fla_SOURCE_DIR}/)
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -D ROOT=${fla_SOURCE_DIR} -D LIST=${list} -D OUTPUT=${output}
            -P ${fla_SOURCE_DIR}/cmake/frozen_hash.cmake
    DEPENDS ${list} ${frozen} ${fla_SOURCE_DIR}/cmake/frozen_hash.cmake
    COMMENT "Hashing the frozen files" VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()
