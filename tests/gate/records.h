// What is recorded of the tests (tests/gate/records): which functions each exercises, and how many of its calls each
// backend of a GPU refuses. `fla gate OP` selects by the first; whoever runs a test holds it to both, and
// `fla gate ... --record` writes them anew.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fla::gate {

using Names = std::set<std::string>;

// A test of one function exercises that one by its name; what it calls besides has to be recorded.
void belongs_to(const std::string& test, const std::string& function);
Names exercised_by(const std::string& test);
// A line "exercises TEST: FUNCTION FUNCTION" for every test that there is, or for those of one function alone: others judge
// no backend.
void list_exercises(bool of_one_function);

// From now on a test fails that calls a function (or its backward) which it does not say. Recording, it does not fail:
// the report gets what it calls.
void watch_exercises(bool recording);
bool recording();
// For what a test does where nobody sees it, in another program.
void note_exercise(const std::string& function);

struct Refusals {
  int calls = 0;
  bool none_taken = false;  // the backend takes no call of the test
};
// Empty where nothing is recorded of the backend.
std::optional<Refusals> recorded_refusals(const std::string& backend, const std::string& test);

// The kernels of a backend ("cpu", "cuda") that a test has cases for; and all that any test has.
std::vector<std::string> recorded_kernels(const std::string& backend, const std::string& test);
Names recorded_kernels(const std::string& backend);
// The first of the tests, by name, that have cases for it; empty: none.
std::string first_test(const std::string& backend, const std::string& kernel);
// Kernels of a backend that no call reaches, each with the reason in records/unreached_BACKEND.txt.
Names unreached_kernels(const std::string& backend);
// Of these names those that are in neither list.
Names without_a_case(const std::vector<std::string>& names, const Names& recorded, const Names& unreached);

}  // namespace fla::gate
