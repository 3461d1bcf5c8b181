// An effort as one self-contained page.
#pragma once

#include <string>
#include <vector>

#include "tools/loop/effort.h"

namespace fla::tools {

struct ReportInput {
  Effort effort;
  State state;
  Json evidence;  // the verify run whose shapes are shown: the promotion's, else the last kept row's, else the last
  std::string source;  // where it is from
};
std::string escape_html(const std::string& text);
std::string render_report(const ReportInput& in);

}  // namespace fla::tools
