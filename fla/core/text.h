// Text from outside, made fit for a message.
#pragma once

#include <string>
#include <string_view>

#include "fla/core/export.h"

namespace fla {

// Control characters and bytes that are no UTF-8 as escapes ("\n", "\x1b"): a name must neither break a message's lines
// nor reach a terminal as a command.
FLA_API std::string printable(std::string_view text);

}  // namespace fla
