// Prints the version of the library that it runs with; fails when headers, C++ and C do not agree about it.
#include <cstdio>
#include <cstring>

#include "fla/fla.hpp"
#include "fla/version.h"

extern "C" const char* version_through_c(void);

int main() {
  const fla::Context context;
  std::printf("%s (%s, %s)\n", fla::version(), fla::build_info().commit, fla::build_info().compiler);
  if (std::strcmp(fla::version(), FLA_VERSION) == 0 && std::strcmp(version_through_c(), FLA_VERSION) == 0) return 0;
  std::fprintf(stderr, "headers: %s, C: %s\n", FLA_VERSION, version_through_c());
  return 1;
}
