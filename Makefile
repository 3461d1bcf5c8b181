# A front for CMake: make help. Everything is built in build/<preset>.
OP ?= chunk_gla
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CUDA_ARCHITECTURES ?=
ASAN_TESTS ?=
ASAN_ALL ?= 0

.PHONY: help build verify test bench cuda cuda-resources asan tsan fuzz neon format lint install package-test clean
.DEFAULT_GOAL := help

help:
	@echo "make verify [OP=chunk_gla]     install what is missing, build, run the gate and the benchmark of OP on the CPU"
	@echo "make test                      install what is missing, build, run every test"
	@echo "make bench [OP=chunk_gla]      the benchmark alone"
	@echo "make build                     the release build alone: build/release/bin/fla"
	@echo "make install [PREFIX=DIR]      build, and install into $(PREFIX) unless told otherwise"
	@echo "make cuda                      build with CUDA: build/cuda/bin/fla; CUDA_ARCHITECTURES=90a-real for one GPU alone"
	@echo "make cuda-resources            registers, shared memory and spills of every CUDA kernel"
	@echo "make asan | tsan | neon        tests under the sanitizers (ASAN_TESTS='fla_gate' for some); on Arm under qemu-user"
	@echo "                               asan runs a fourth of the gate, drawn by the commit; ASAN_ALL=1 all of it"
	@echo "make fuzz [FUZZ_SECONDS=60]    each fuzz target for that long"
	@echo "make format | lint             the formatter; static checks and banned constructs"
	@echo "make package-test              use the installed library from a project outside the tree"
	@echo "make clean                     remove build/"
	@echo "NO_INSTALL=1 makes each name what is missing and stop. JOBS=N limits parallel jobs."

# $(call deps,GROUP...) installs what is missing; $(call build,PRESET) configures once and builds. The build itself
# reconfigures when a CMake file changes.
deps = @scripts/install-deps.sh $(1)
define build
@if [ ! -e build/$(1)/build.ninja ] || [ CMakePresets.json -nt build/$(1)/build.ninja ]; then \
  cmake --preset $(1) -Wno-dev && touch build/$(1)/build.ninja; fi
cmake --build --preset $(1) -j $(JOBS) $(if $(2),--target $(2))
endef

build:
	$(call deps,build test)
	$(call build,release)

verify: build
	build/release/bin/fla verify --op $(OP)

bench: build
	build/release/bin/fla bench $(OP)

test:
	$(call deps,build test)
	$(call build,release,all fla_tests)
	ctest --preset release -j $(JOBS)

install: build
	cmake --install build/release --prefix $(PREFIX)

package-test: build
	scripts/package-test.sh

cuda:
	$(call deps,build test)
	@[ -z "$(CUDA_ARCHITECTURES)" ] || cmake --preset cuda -Wno-dev -DFLA_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)"
	$(call build,cuda,$(or $(CUDA_TARGET),all fla_tests))

cuda-resources:
	scripts/cuda-resources.sh

asan:
	$(call deps,build test)
	$(call build,asan,$(ASAN_TESTS))
	@ASAN_ALL=$(ASAN_ALL) scripts/sanitizer-part.sh
	ASAN_ALL=$(ASAN_ALL) ctest --preset asan -j $(JOBS) $(if $(ASAN_TESTS),-R "^($$(echo $(ASAN_TESTS) | tr ' ' '|'))")

tsan:
	$(call deps,build test)
	$(call build,tsan,fla_core_test fla_gate)
	scripts/run-tsan.sh

fuzz:
	$(call deps,build fuzz)
	$(call build,fuzz)
	scripts/run-fuzz.sh $(FUZZ_SECONDS)

neon:
	$(call deps,build neon)
	scripts/neon-sysroot.sh
	$(call build,neon,fla_core_test fla_gate)
	scripts/run-neon.sh

format:
	$(call deps,lint)
	scripts/format.sh

lint:
	$(call deps,build test lint)
	scripts/check-banned.sh
	scripts/format.sh --check
	scripts/lint.sh

clean:
	rm -rf build
