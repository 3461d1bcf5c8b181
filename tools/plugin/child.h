// --plugin: a command with somebody else's kernel runs in a child process, which the parent watches.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tools/command.h"

namespace fla::tools {

void add_plugin(CLI::App* app, PluginOptions& o);

// Runs `body` and returns its exit code. With a plug-in that is in a child process which has loaded it; `body` gets the
// name of its backend. A child that crashes, hangs or ends early is exit code 1 and a text that says where; with json
// also the document `failed` on stdout, with the text as "error". Without a plug-in it is body("").
int with_plugin(const PluginOptions& o, bool json, Json failed,
                const std::function<int(const std::string& backend)>& body);

// The same for work in parts that stand alone: `part` answers in a child process, and `done` gets each answer here. A
// child that dies at a part costs that part alone, which `died` gets with the text; the next child goes on behind it.
// The exit code is the child's when the plug-in cannot be loaded, else kGood.
struct PluginParts {
  std::size_t count = 0;
  std::function<Json(std::size_t index, const std::string& backend)> part;
  std::function<void(std::size_t index, const Json& answer)> done;
  std::function<void(std::size_t index, const std::string& text)> died;
};
int in_parts(const PluginOptions& o, bool json, Json failed, const PluginParts& work);

// Those of `ops` that the plug-in serves; the others are named on stderr. None at all is refused. Without a plug-in
// everything stays.
std::vector<const Registry::Entry*> keep_served(std::vector<const Registry::Entry*> ops, const PluginOptions& o,
                                                const std::string& backend);

}  // namespace fla::tools
