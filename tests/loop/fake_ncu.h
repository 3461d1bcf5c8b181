// A script in PATH that plays Nsight Compute.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace fla::tools {

class FakeNcu : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "fla_ncu.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
    path_ = std::getenv("PATH");
    setenv("PATH", (dir_.string() + ":" + path_).c_str(), 1);
  }
  void TearDown() override {
    setenv("PATH", path_.c_str(), 1);
    std::filesystem::remove_all(dir_);
  }
  void ncu(const std::string& body) const {
    std::ofstream(dir_ / "ncu") << "#!/bin/sh\n" << body << "\n";
    std::filesystem::permissions(dir_ / "ncu", std::filesystem::perms::owner_all);
  }
  std::filesystem::path dir_;
  std::string path_;
};

}  // namespace fla::tools
