// Errors are values: a code a program can act on and a message a person can.
#pragma once

#include <string>
#include <utility>

namespace fla {

enum class Code : int {
  Ok = 0,
  InvalidArgument = 1,  // the operator's contract forbids the call
  Unsupported = 2,      // legal, but no backend took it; the message lists every refusal
  OutOfMemory = 3,      // an allocation failed, or the caller's workspace is too small
  DeviceError = 4,      // the device or its driver failed
  Internal = 5,         // a defect of the library
};

constexpr const char* name_of(Code c) {
  switch (c) {
    case Code::Ok: return "Ok";
    case Code::InvalidArgument: return "InvalidArgument";
    case Code::Unsupported: return "Unsupported";
    case Code::OutOfMemory: return "OutOfMemory";
    case Code::DeviceError: return "DeviceError";
    case Code::Internal: return "Internal";
  }
  return "?";
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::Ok; }
  explicit operator bool() const { return ok(); }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::Ok;
  std::string message_;
};

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return status_.ok(); }
  explicit operator bool() const { return ok(); }
  const Status& status() const { return status_; }
  T& value() { return value_; }
  const T& value() const { return value_; }
  T& operator*() { return value_; }
  const T& operator*() const { return value_; }
  T* operator->() { return &value_; }
  const T* operator->() const { return &value_; }

 private:
  Status status_;
  T value_{};
};

}  // namespace fla
