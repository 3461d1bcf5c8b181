// fla loop: the optimisation loop, enforced.
#include <memory>

#include "CLI/CLI.hpp"
#include "tools/command.h"
#include "tools/loop/commands.h"
#include "tools/loop/effort.h"

namespace fla::tools {

Command add_loop(CLI::App& root) {
  struct Options {
    InitOptions init;
    StepOptions step;
    AssessOptions assess;
    NoGoOptions no_go;
    PromoteOptions promote;
    std::string status_op, trap_op, fact, why, apply;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* app =
      add_command(root, "loop", "Make an operator faster, one proven step at a time",
                  "  fla loop init chunk_gla --shapes B1_T4096_H16_D64 --modes fwd --speedup 1.1 --scope "
                  "'fla/engine/diag/cpu/*' "
                  "--languages C++ --entry diag_chunk_forward --criteria 'no shape slower' --machine here --cap 12\n"
                  "  fla loop step chunk_gla --direction 'keep the state in registers over two rows'\n"
                  "  fla loop status chunk_gla --json");
  app->require_subcommand(1);
  const auto command = [&](const char* name, const char* doc, std::string& op) {
    CLI::App* sub = app->add_subcommand(name, doc);
    sub->add_option("OP", op, "the operator")->required();
    add_json(sub, o->json);
    return sub;
  };

  CLI::App* init = command("init", "write the task contract, then measure the baseline", o->init.op);
  for (const auto& f : contract_fields())
    if (*f.option != '\0')
      init->add_option(f.option, o->init.fields[f.key], f.doc)
          ->check(f.words.empty() ? not_empty("a value") : one_of(f.words));
  init->add_option("--file", o->init.file, "a filled contract (docs/draft.md's table)")->check(not_empty("a file"));

  CLI::App* step = command("step", "one iteration: commit the change, gate, benchmark, log", o->step.op);
  step->add_option("--direction", o->step.direction, "what was changed, and why it should help; one line");
  step->add_option("--note", o->step.note, "what the result means, for the log");
  step->add_option("--lessons", o->step.lessons, "of a kept candidate: the mechanism, not the number");
  step->add_option("--levers", o->step.levers, "of a kept candidate: what could be tried next");
  step->add_option("--floor", o->step.floor, "claim that a floor is reached: which limit, with its number");
  step->add_option("--bucket", o->step.bucket, "the change serves only shapes under this condition");
  step->add_option("--bucket-entry", o->step.bucket_entry, "function that serves them");
  step->add_option("--bucket-shapes", o->step.bucket_shapes, "shapes of that condition to prove it on");
  step->add_option("--bucket-why", o->step.bucket_why, "what the profile shows there and not elsewhere");

  CLI::App* status = command("status", "state, and the evidence that is missing", o->status_op);

  CLI::App* assess = command("assess", "after a stall: profile, look back, choose", o->assess.op);
  assess->add_option("--axes", o->assess.axes, "what the log does not say about the axes tried");
  assess->add_option("--techniques", o->assess.techniques, "techniques known for this family");
  assess->add_option("--next", o->assess.next, "next direction");
  assess->add_option("--why", o->assess.why, "why that one");

  CLI::App* no_go = command("no-go", "conclude that there is no win to ship", o->no_go.op);
  no_go->add_option("--limit", o->no_go.limit, "the active limit or blocker, with its number");
  no_go->add_option("--summary", o->no_go.summary, "what was learned");

  CLI::App* promote = command("promote", "prove the win twice and write the evidence page", o->promote.op);
  promote->add_option("--reading", o->promote.reading, "the profiler or roofline reading that explains the win");
  promote->add_option("--impact", o->promote.impact, "which shapes, types, backends and users see a change");
  promote->add_option("--summary", o->promote.summary, "what was changed");
  promote->add_option("--breaking", o->promote.breaking, "breaking changes (default none)");
  promote->add_option("--accept", o->promote.accept, "SHAPE=REASON: a regressed shape that is shipped all the same");

  CLI::App* trap = app->add_subcommand("trap", "what fools a measurement");
  trap->require_subcommand(1);
  CLI::App* add = trap->add_subcommand("add", "record a trap met in an effort");
  add->add_option("OP", o->trap_op, "the operator")->required();
  add->add_option("--fact", o->fact, "what is so")->required();
  add->add_option("--why", o->why, "why it fools")->required();
  add->add_option("--apply", o->apply, "how to apply the lesson")->required();
  add_json(add, o->json);
  CLI::App* list = trap->add_subcommand("list", "the catalogue, and the traps of an effort");
  list->add_option("OP", o->trap_op, "the operator");
  add_json(list, o->json);

  return {app, [=] {
            o->init.json = o->step.json = o->assess.json = o->no_go.json = o->promote.json = o->json;
            if (init->parsed()) return loop_init(o->init);
            if (step->parsed()) return loop_step(o->step);
            if (status->parsed()) return loop_status(o->status_op, o->json);
            if (assess->parsed()) return loop_assess(o->assess);
            if (no_go->parsed()) return loop_no_go(o->no_go);
            if (promote->parsed()) return loop_promote(o->promote);
            if (add->parsed()) return loop_trap_add(o->trap_op, o->fact, o->why, o->apply, o->json);
            return loop_trap_list(o->trap_op, o->json);
          }};
}

}  // namespace fla::tools
