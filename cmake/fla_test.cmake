# fla_test(NAME SOURCES FILE... [SHARDS N] [NO_MAIN])
#
# A GoogleTest program build/<preset>/bin/NAME and its ctest entries, run from the repository's root: one, or N that each
# run a part of the tests so that ctest -j uses N cores. NO_MAIN: the sources have a main of their own. Without sources
# there is no target. A run that selects nothing fails.
function(fla_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NO_MAIN" "SHARDS" "SOURCES")
  if(NOT arg_SOURCES)
    message(STATUS "fla: no sources for ${name}, skipped")
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${fla_BINARY_DIR}/bin)
  target_link_libraries(${name} PRIVATE fla_options fla_cold_options fla_tools_common GTest::gtest)
  target_precompile_headers(${name} REUSE_FROM fla_test_headers)
  if(NOT arg_NO_MAIN)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
  endif()
  # Where the committed recorded cases are; an installed program finds its own through its place.
  target_compile_definitions(${name} PRIVATE FLA_SOURCE_DIR="${fla_SOURCE_DIR}")
  fla_include_root(${name})
  add_dependencies(fla_tests ${name})

  if(NOT arg_SHARDS)
    set(arg_SHARDS 1)
  endif()
  foreach(i RANGE 1 ${arg_SHARDS})
    set(test ${name})
    set(command ${name})
    set(environment "")
    set(timeout 1800)
    if(arg_SHARDS GREATER 1)
      math(EXPR index "${i} - 1")
      set(test ${name}.${i}of${arg_SHARDS})
      set(environment GTEST_TOTAL_SHARDS=${arg_SHARDS} GTEST_SHARD_INDEX=${index})
    endif()
    # A sanitizer makes tests several times slower: a program that has parts runs a fourth of them, drawn by the commit.
    if(FLA_SANITIZE AND arg_SHARDS GREATER 1)
      set(command ${fla_SOURCE_DIR}/scripts/sanitizer-part.sh ${i} ${arg_SHARDS} $<TARGET_FILE:${name}>)
      set(environment "")
      set(timeout 14400)  # with ASAN_ALL=1
    endif()
    add_test(NAME ${test} COMMAND ${command} WORKING_DIRECTORY ${fla_SOURCE_DIR})
    set_tests_properties(${test} PROPERTIES ENVIRONMENT "${environment}" TIMEOUT ${timeout}
      FAIL_REGULAR_EXPRESSION "Running 0 tests from")
  endforeach()
endfunction()
