// Who calls what, for tests that say what they exercise.
#pragma once

#include "fla/registry/spec.h"

namespace fla {

// Told of every call before it is checked, by the thread that makes it.
using CallObserver = void (*)(const FunctionSpec& spec);
void observe_calls(CallObserver observer);  // nullptr: nobody, as it is from the start

}  // namespace fla
