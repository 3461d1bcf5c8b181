#include "tools/compare/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>

#include "tools/command.h"

extern char** environ;

namespace fla::tools {
namespace {

volatile std::sig_atomic_t g_signal = 0;
constexpr std::chrono::seconds kGrace{2};  // to end in, after SIGTERM

struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw Stop(kFailed, std::string("pipe: ") + std::strerror(errno));
    read_end = ends[0];
    write_end = ends[1];
  }
  ~Pipe() {
    close_read();
    close_write();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_read() { close_one(read_end); }
  void close_write() { close_one(write_end); }

 private:
  static void close_one(int& fd) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
};

std::vector<std::string> environment_of(const ChildOptions& o) {
  std::vector<std::string> list;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string entry = *e;
    const std::string name = entry.substr(0, entry.find('='));
    const bool replaced =
        std::any_of(o.environment.begin(), o.environment.end(), [&](const auto& v) { return v.first == name; });
    if (!replaced && std::find(o.unset.begin(), o.unset.end(), name) == o.unset.end()) list.push_back(entry);
  }
  for (const auto& [name, value] : o.environment) list.push_back(name + "=" + value);
  return list;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> p;
  p.reserve(words.size() + 1);
  for (auto& w : words) p.push_back(w.data());
  p.push_back(nullptr);
  return p;
}

// True when there may be more.
bool drain(int fd, std::string& into) {
  char buffer[65536];
  const ssize_t n = read(fd, buffer, sizeof buffer);
  if (n > 0) into.append(buffer, static_cast<std::size_t>(n));
  return n > 0 || (n < 0 && errno == EINTR);
}

}  // namespace

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = [](int number) { g_signal = number; };
  sigemptyset(&action.sa_mask);
  for (const int s : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction old {};
    // A signal that whoever started this program told it to ignore stays ignored.
    if (sigaction(s, nullptr, &old) == 0 && old.sa_handler != SIG_IGN) sigaction(s, &action, nullptr);
  }
  std::signal(SIGPIPE, SIG_IGN);
}

void throw_if_interrupted() {
  if (g_signal != 0) throw Interrupted(g_signal);
}

PauseSignals::PauseSignals() : pending_(g_signal) { g_signal = 0; }
PauseSignals::~PauseSignals() {
  if (pending_ != 0) g_signal = pending_;
}

void die_of(int signal) {
  std::signal(signal, SIG_DFL);
  raise(signal);
  _exit(128 + signal);
}

ChildResult run_child(const std::vector<std::string>& argv, const ChildOptions& o) {
  throw_if_interrupted();
  Pipe in, out, err;
  std::vector<std::string> words = argv, env = environment_of(o);
  const std::vector<char*> arguments = pointers(words), environment = pointers(env);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.read_end, STDIN_FILENO);
  if (!o.log.empty()) {
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, o.log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  } else {
    posix_spawn_file_actions_adddup2(&actions, out.write_end, STDOUT_FILENO);
    if (!o.show_errors) posix_spawn_file_actions_adddup2(&actions, err.write_end, STDERR_FILENO);
  }
  if (!o.directory.empty()) posix_spawn_file_actions_addchdir_np(&actions, o.directory.c_str());
  // A group of its own: the terminal's ^C reaches this process alone, which passes it on and waits.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t defaults;
  sigemptyset(&defaults);
  sigaddset(&defaults, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = -1;
  const int error = posix_spawnp(&pid, argv[0].c_str(), &actions, &attributes, arguments.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) throw Stop(kUsage, fmt::format("cannot start {}: {}", argv[0], std::strerror(error)));
  in.close_read();
  out.close_write();
  err.close_write();

  ChildResult r;
  std::size_t written = 0;
  bool told = false;
  using Clock = std::chrono::steady_clock;
  Clock::time_point deadline =
      o.timeout_s > 0 ? Clock::now() + std::chrono::seconds(o.timeout_s) : Clock::time_point::max();
  while (out.read_end >= 0 || err.read_end >= 0 || in.write_end >= 0) {
    if (written == o.input.size()) in.close_write();
    pollfd fds[] = {{out.read_end, POLLIN, 0}, {err.read_end, POLLIN, 0}, {in.write_end, POLLOUT, 0}};
    if (poll(fds, 3, 500) < 0 && errno != EINTR) break;
    if (g_signal != 0 && !told) {
      kill(-pid, SIGTERM);
      told = true;
    }
    if (Clock::now() >= deadline) {
      kill(-pid, r.timed_out ? SIGKILL : SIGTERM);
      if (r.timed_out) break;  // whoever still holds the pipes has left the group
      r.timed_out = true;
      deadline = Clock::now() + kGrace;
    }
    if (fds[0].revents != 0 && !drain(out.read_end, r.out)) out.close_read();
    if (fds[1].revents != 0 && !drain(err.read_end, r.err)) err.close_read();
    if (fds[2].revents != 0) {
      const ssize_t n = write(in.write_end, o.input.data() + written, o.input.size() - written);
      if (n > 0) written += static_cast<std::size_t>(n);
      if (n < 0 && errno != EINTR) in.close_write();
    }
  }
  // It may have closed its output and go on. Asked again and again, since a signal that arrives just before a call that
  // waits would be seen only when the child has ended by itself.
  int status = 0;
  useconds_t pause = 100;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (g_signal != 0 && !told) {
      kill(-pid, SIGTERM);
      told = true;
    }
    if (Clock::now() >= deadline) {
      kill(-pid, SIGKILL);
      r.timed_out = true;
      deadline = Clock::time_point::max();
    }
    usleep(pause);
    pause = std::min<useconds_t>(2 * pause, 20000);
  }
  throw_if_interrupted();
  r.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return r;
}

FileLock::FileLock(const std::filesystem::path& path, When when) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) refuse("cannot write {}: {}", path.string(), std::strerror(errno));
  while (flock(fd_, when == When::TryOnce ? LOCK_EX | LOCK_NB : LOCK_EX) != 0) {
    if (errno == EINTR && g_signal == 0) continue;
    const int why = errno;
    if (why == EWOULDBLOCK) return;
    close(fd_);
    throw_if_interrupted();
    refuse("cannot lock {}: {}", path.string(), std::strerror(why));
  }
  held_ = true;
}

FileLock::~FileLock() {
  if (fd_ >= 0) close(fd_);
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::error_code error;
  if (!path.parent_path().empty()) std::filesystem::create_directories(path.parent_path(), error);
  std::filesystem::path part = path;
  part += ".part";
  const auto give_up = [&](int why) {
    std::filesystem::remove(part, error);
    refuse("cannot write {}: {}", path.string(), std::strerror(why));
  };
  // What lies there is from a run that was killed, or a link that leads elsewhere: a new file, never through it.
  std::filesystem::remove(part, error);
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd < 0) refuse("cannot write {}: {}", path.string(), std::strerror(errno));
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int why = errno;
      close(fd);
      give_up(why);
    }
    done += static_cast<std::size_t>(n);
  }
  if (close(fd) != 0) give_up(errno);
  std::filesystem::rename(part, path, error);
  if (error) refuse("cannot write {}: {}", path.string(), error.message());
}

}  // namespace fla::tools
