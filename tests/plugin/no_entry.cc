// A shared library that is no plug-in.
extern "C" int fla_test_nothing() { return 0; }
