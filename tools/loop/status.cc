#include <algorithm>

#include "tools/loop/commands.h"
#include "tools/loop/session.h"

namespace fla::tools {

int loop_status(const std::string& op, bool json) {
  const Session s("status", op, true, Session::Access::Read);
  Json more;
  more["running"] = s.another_works();
  more["branch"] = branch_of(op);
  more["records"] = s.relative.generic_string();
  more["iterations_left"] = std::max(0, s.effort.contract.cap() + 1 - s.effort.next_iteration());
  if (const LogRow* best = s.effort.best()) more["best"] = {{"iteration", best->iteration}, {"total", best->total}};
  return answer(s, {.state = s.state(), .more = std::move(more)}, json);
}

}  // namespace fla::tools
