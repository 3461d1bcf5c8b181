# cmake -D ROOT= -D TEMPLATE= -D OUTPUT= -P build_info.cmake
# Writes OUTPUT with the commit of ROOT: "unknown" when ROOT is not itself a git work tree (an unpacked archive, even one
# inside another repository), "-dirty" appended when anything differs from the commit, new files included. The records of
# optimisation efforts are no part of what is built and do not count.
set(FLA_COMMIT unknown)
find_program(GIT git)
if(GIT)
  set(git ${GIT} --no-optional-locks -C ${ROOT})
  execute_process(COMMAND ${git} rev-parse --show-toplevel OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(REAL_PATH ${ROOT} root)
  if(top)
    file(REAL_PATH ${top} top)
  endif()
  if(top STREQUAL root)
    execute_process(COMMAND ${git} rev-parse --short=12 --verify HEAD RESULT_VARIABLE failed
      OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT failed)
      execute_process(COMMAND ${git} status --porcelain -- . ":(exclude)profile" OUTPUT_VARIABLE changes ERROR_QUIET)
      set(FLA_COMMIT ${commit})
      if(changes)
        string(APPEND FLA_COMMIT -dirty)
      endif()
    endif()
  endif()
endif()
configure_file(${TEMPLATE} ${OUTPUT} @ONLY)
