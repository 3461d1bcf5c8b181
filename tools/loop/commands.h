// The subcommands of `fla loop`, each a function of its options.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace fla::tools {

struct InitOptions {
  std::string op, file, base;
  std::map<std::string, std::string> fields;  // by the contract's names
  bool json = false;
};
int loop_init(const InitOptions& o);

struct StepOptions {
  std::string op, direction, note, lessons, levers, floor;
  // Of a shape bucket: all of them or none.
  std::string bucket, bucket_entry, bucket_shapes, bucket_why;
  bool json = false;
};
int loop_step(const StepOptions& o);

int loop_status(const std::string& op, bool json);

struct AssessOptions {
  std::string op, axes, techniques, next, why;
  bool json = false;
};
int loop_assess(const AssessOptions& o);

struct NoGoOptions {
  std::string op, limit, summary;
  bool json = false;
};
int loop_no_go(const NoGoOptions& o);

struct PromoteOptions {
  std::string op, reading, impact, summary, breaking = "none";
  std::vector<std::string> accept;  // "SHAPE=REASON"
  bool json = false;
};
int loop_promote(const PromoteOptions& o);

int loop_trap_add(const std::string& op, const std::string& fact, const std::string& why, const std::string& apply,
                  bool json);
int loop_trap_list(const std::string& op, bool json);

}  // namespace fla::tools
