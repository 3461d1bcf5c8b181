// JSON as files from outside need it: no exception escapes, and a name that an object holds twice is an error, where
// the parser alone would keep one of the two values in silence.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fla/core/status.h"
#include "fla/core/text.h"

namespace fla::tools {

// What a message shows of text that may be long: at most 80 bytes, no character of UTF-8 cut in two.
inline std::string excerpt(std::string_view text) {
  std::size_t cut = 80;
  if (text.size() > cut) {
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;
  }
  return printable(text.substr(0, cut)) + (text.size() > cut ? "..." : "");
}

// The failing status has no file name in it: the caller knows that.
template <typename Json>
Result<Json> parse_json_strict(std::string_view text) {
  std::vector<std::set<std::string, std::less<>>> open;  // names so far of each open object; arrays count as one
  std::string twice;
  bool found = false;
  using Event = typename Json::parse_event_t;
  const auto watch = [&](int, Event event, Json& parsed) {
    switch (event) {
      case Event::object_start:
      case Event::array_start: open.emplace_back(); break;
      case Event::object_end:
      case Event::array_end: open.pop_back(); break;
      case Event::key:
        if (!open.back().insert(parsed.template get_ref<const std::string&>()).second && !found) {
          twice = parsed.template get_ref<const std::string&>();
          found = true;
        }
        break;
      case Event::value: break;
    }
    return true;
  };
  try {
    Json j = Json::parse(text, watch);
    if (found) return Status(Code::InvalidArgument, "expected every name once, got '" + excerpt(twice) + "' twice");
    return j;
  } catch (const typename Json::parse_error& e) {
    return Status(Code::InvalidArgument, "expected JSON, got an error at byte " + std::to_string(e.byte));
  } catch (const typename Json::exception&) {
    return Status(Code::InvalidArgument, "expected JSON, got a number that does not fit");
  }
}

}  // namespace fla::tools
