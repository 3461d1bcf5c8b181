// FLA_API marks what the shared library exports. Everything else is compiled with hidden visibility.
#pragma once

#if defined(__GNUC__)
#define FLA_API __attribute__((visibility("default")))
#else
#define FLA_API
#endif
