# tidegate: everything a person does here. `make help` lists the targets; a target's line there is its `##` comment.
#
# Must not enter: anything that needs a tool at parse time that `make setup` would have to install first.

B ?= build
# VARIANT=asan or tsan: the same targets under sanitizers, in a folder of their own below B.
VARIANT ?= plain
PREFIX ?= /usr/local
ifeq ($(origin CC),default)
CC = gcc
endif
CFLAGS ?= -O2 -g
WARN = -std=c11 -Wall -Wextra -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla
PKGS = libsodium yaml-0.1 hiredis

ifeq ($(VARIANT),asan)
SAN = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifeq ($(VARIANT),tsan)
# The sanitizer knows no fences and says so; what they order is copied out and checked, and no thread test goes there.
SAN = -fsanitize=thread -fno-omit-frame-pointer -Wno-tsan
else ifneq ($(VARIANT),plain)
$(error VARIANT is plain, asan or tsan, not "$(VARIANT)")
endif
ifneq ($(VARIANT),plain)
override B := $(B)/$(VARIANT)
# Instrumented, gcc no longer sees how large a printed number can be and warns of what cannot happen.
CFLAGS = -O1 -g -Wno-format-truncation
endif

# TLS to Redis where there is OpenSSL; TLS=no: without.
TLS ?= yes

# One short line a file; V=1 shows the commands, -s nothing.
ifeq ($(V),1)
Q =
else
Q = @
endif
SAY = $(if $(and $(Q),$(if $(findstring s,$(firstword -$(MAKEFLAGS))),,yes)),@printf '  %-6s %s\n' $(1) $(2))

TLS_PKG = $(eval TLS_PKG := $$(if $$(filter no,$$(TLS)),,$$(shell pkg-config --exists openssl && echo openssl)))$(TLS_PKG)
# pkg-config is asked at the first compilation, not while reading this file: `make setup` runs before it is there.
PKG_CFLAGS = $(eval PKG_CFLAGS := $$(shell pkg-config --cflags $(PKGS) $(TLS_PKG)) $$(if $(TLS_PKG),-DTG_WITH_TLS))$(PKG_CFLAGS)
PKG_LIBS = $(eval PKG_LIBS := $$(shell pkg-config --libs $(PKGS) $(TLS_PKG)))$(PKG_LIBS)
TG_CPPFLAGS = $(CPPFLAGS) -D_GNU_SOURCE -Icsrc -Icsrc/include -I. $(PKG_CFLAGS)
# Neighbouring numbers that were just written one by one stay apart: read back as one vector they would have to wait
# until the writing is through, 3 of the 86 ns of a decision.
TG_CFLAGS = $(WARN) $(CFLAGS) -fno-tree-slp-vectorize -fPIC -fvisibility=hidden -pthread $(SAN)
TG_LDLIBS = $(LDLIBS) $(PKG_LIBS) -pthread
# What a file depends on is noted under both names of it: B may be spelt as a path in this folder or from the root, and a
# change of a header has to be seen either way.
NOTED = -MMD -MP $(addprefix -MT ,$(sort $(abspath $@) $(patsubst $(CURDIR)/%,%,$(abspath $@))))
COMPILE = $(CC) $(TG_CPPFLAGS) $(TG_CFLAGS) $(NOTED)

VERSION = $(shell sed -n 's/^.define TG_VERSION "\(.*\)"/\1/p' csrc/include/tidegate.h)
PYTHON = .venv/bin/python

# ---- what there is ---------------------------------------------------------------------------------------------------

LIB_SRC := $(sort $(shell find csrc -name '*.c' -not -path 'csrc/cli/*'))
FCGI_SRC := $(sort $(wildcard fcgi/*.c))
CLI_SRC := $(sort $(wildcard csrc/cli/*.c))
# The rest of the room is what its tests and the benchmark's constant responder link.
FCGI_ROOM_SRC := $(filter-out fcgi/daemon.c,$(FCGI_SRC))
# A source without a main() is a piece that others include; a peer_ is a program of its own that a test builds.
TEST_SRC := $(sort $(shell find tests -name '*.c' -not -path 'tests/fuzz/*' -not -name 'peer_*' -exec grep -lE '^(int )?main\b' {} +))
# Under the thread sanitizer only what has threads.
ifeq ($(VARIANT),tsan)
TEST_SRC := $(sort $(shell grep -lsE 'pthread_create|test-builds:.*tsan' $(TEST_SRC) /dev/null))
endif
# A test that stops inside the library at a chosen step says TG_TEST_HOOKS and gets a library compiled with it.
HOOKED_SRC := $(sort $(shell grep -lsw TG_TEST_HOOKS $(TEST_SRC) /dev/null))
# FUZZ_ONLY="fcgi fcgi_relay": these targets alone.
FUZZ_SRC := $(sort $(wildcard $(patsubst %,tests/fuzz/fuzz_%.c,$(or $(FUZZ_ONLY),*))))
BENCH_SRC := $(sort $(filter-out bench/empty_method.c,$(wildcard bench/*.c)))

LIB_OBJ := $(LIB_SRC:%.c=$(B)/obj/%.o)
HOOKS_OBJ := $(LIB_SRC:%.c=$(B)/hooks/%.o)
FCGI_OBJ := $(FCGI_SRC:%.c=$(B)/obj/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(B)/obj/%.o)
FCGI_ROOM_OBJ := $(FCGI_ROOM_SRC:%.c=$(B)/obj/%.o)
PROGRAMS := $(B)/bin/tidegate $(if $(FCGI_SRC),$(B)/bin/tidegate-fcgi)
# tidegate-cgi lives for one request: whatever is loaded or set up at its start is a part of each. So it is linked
# statically, without libyaml and hiredis, and with musl where that is there: glibc's start asks the processor for its
# caches, 300 us where a hypervisor answers. CGI_CC=gcc builds it without; CGI_LDFLAGS= links it as anything else.
CGI_SRC := $(sort $(wildcard fcgi/cgi/*.c))
CGI_CC ?= $(or $(if $(filter plaingcc,$(VARIANT)$(notdir $(CC))),$(shell command -v musl-gcc)),$(CC))
CGI_LDFLAGS ?= $(if $(filter plain,$(VARIANT)),-static)
CGI_ALL_SRC := $(CGI_SRC) fcgi/answer.c fcgi/codec.c fcgi/judging.c fcgi/listen.c fcgi/log.c \
    $(filter-out csrc/config/yaml_tree.c csrc/stores/redis/% csrc/stores/tiered/%,$(LIB_SRC))
# Under sanitizers it is a program like any other.
CGI_OBJ := $(CGI_ALL_SRC:%.c=$(B)/$(if $(filter plain,$(VARIANT)),cgi,obj)/%.o)
# tests/c/a/test_b.c becomes $(B)/tests/a/test_b, any other tests/x/y.c $(B)/tests/x/y.
test_bin = $(patsubst tests/%.c,$(B)/tests/%,$(patsubst tests/c/%.c,$(B)/tests/%,$(1)))
TEST_BIN := $(foreach source,$(TEST_SRC),$(call test_bin,$(source)))
FUZZ_BIN := $(FUZZ_SRC:tests/fuzz/%.c=$(B)/fuzz/%)
BENCH_BIN := $(BENCH_SRC:bench/%.c=$(B)/bench/%)

.PHONY: all help setup docs dist wheels build lib programs python c-tests c-tests-asan c-tests-tsan test demo bench bench-programs bench-fcgi bench-python \
        bench-instructions bench-redis fuzz fuzz-programs install deb clean
.DELETE_ON_ERROR:
.SUFFIXES:
all: build

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 28

setup: ## install what is missing: Debian packages and a .venv (as root or with sudo)
	@.ci/setup test

# ---- building --------------------------------------------------------------------------------------------------------

build: lib programs python ## the library, build/bin/ and the Python package; warnings are errors

lib: $(B)/lib/libtidegate.a $(B)/lib/libtidegate.so $(B)/lib/pkgconfig/tidegate.pc $(B)/lib/pkgconfig/tidegate-fcgx.pc ## the C library, in build/lib
programs: $(PROGRAMS) $(B)/bin/tidegate-cgi ## the programs in build/bin

$(B)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(COMPILE) -c $< -o $@

# The scripts are part of these objects, and no header that the compiler would tell of.
$(foreach o,obj hooks,$(B)/$(o)/csrc/stores/redis/script.o $(B)/$(o)/csrc/stores/redis/keep.o): $(wildcard csrc/stores/redis/*.lua)
$(B)/obj/fcgi/page.o: fcgi/page.css fcgi/page.js

$(B)/hooks/%.o: %.c
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(COMPILE) -DTG_TEST_HOOKS -c $< -o $@

$(B)/lib/libtidegate.a: $(LIB_OBJ)
$(B)/lib/libtidegate-hooks.a: $(HOOKS_OBJ)
$(B)/lib/fcgi-room.a: $(FCGI_ROOM_OBJ)
$(B)/lib/%.a:
	@mkdir -p $(@D)
	@rm -f $@
	$(call SAY,AR,$@)
	$(Q)$(AR) rcs $@ $^

# Linked under its versioned name, so that a program built against it asks for that one.
$(B)/lib/libtidegate.so: $(LIB_OBJ)
	@mkdir -p $(@D)
	$(call SAY,LD,$@)
	$(Q)$(CC) $(TG_CFLAGS) $(LDFLAGS) -shared -Wl,-soname,libtidegate.so.0 -Wl,-z,defs $^ $(TG_LDLIBS) -o $@.0
	@ln -sf libtidegate.so.0 $@

# Relative to itself: the folder can be moved, and `make install` writes the same file.
$(B)/lib/pkgconfig/tidegate.pc: csrc/include/tidegate.h Makefile
	@mkdir -p $(@D) $(B)/include
	@cp csrc/include/tidegate.h $(B)/include/
	@printf '%s\n' 'prefix=$${pcfiledir}/../..' 'libdir=$${prefix}/lib' 'includedir=$${prefix}/include' '' \
	    'Name: tidegate' 'Description: one rate limiter for every part of a site' 'Version: $(VERSION)' \
	    'Requires.private: $(PKGS) $(TLS_PKG)' 'Libs: -L$${libdir} -ltidegate' 'Libs.private: -pthread' \
	    'Cflags: -I$${includedir}' > $@

# For applications that serve with libfcgi: one header, nothing to link but the two libraries.
$(B)/lib/pkgconfig/tidegate-fcgx.pc: fcgi/fcgx/tidegate_fcgx.h csrc/include/tidegate.h Makefile
	@mkdir -p $(@D) $(B)/include
	@cp fcgi/fcgx/tidegate_fcgx.h $(B)/include/
	@printf '%s\n' 'Name: tidegate-fcgx' 'Description: tidegate inside applications that use libfcgi' \
	    'Version: $(VERSION)' 'Requires: tidegate = $(VERSION) fcgi' > $@

$(B)/bin/tidegate: $(CLI_OBJ) $(B)/lib/libtidegate.a
$(B)/bin/tidegate-fcgi: $(FCGI_OBJ) $(B)/lib/libtidegate.a
$(PROGRAMS):
	@mkdir -p $(@D)
	$(call SAY,LD,$@)
	$(Q)$(CC) $(TG_CFLAGS) $(LDFLAGS) $^ $(TG_LDLIBS) -o $@

CGI_CFLAGS = $(WARN) $(CFLAGS) $(SAN) -ffunction-sections -fdata-sections -pthread
$(B)/cgi/%.o: %.c
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(CGI_CC) $(CPPFLAGS) -D_GNU_SOURCE -Icsrc -Icsrc/include -I. $(CGI_CFLAGS) $(NOTED) -c $< -o $@ \
	    $(if $(findstring musl,$(CGI_CC)),-idirafter /usr/include -idirafter /usr/include/$$($(CC) -print-multiarch))

$(B)/bin/tidegate-cgi: $(CGI_OBJ)
	@mkdir -p $(@D)
	$(call SAY,LD,$@)
	$(Q)$(CGI_CC) $(CGI_CFLAGS) $(LDFLAGS) $(CGI_LDFLAGS) -Wl,--gc-sections $^ $(if $(findstring musl,$(CGI_CC)), \
	    $$(pkg-config --variable=libdir libsodium)/libsodium.a,$$(pkg-config --libs libsodium)) -o $@

# One extension in the tree, whatever B is: the package finds it beside its Python files.
PYTHON_SRC := $(LIB_SRC) $(sort $(shell find csrc python setup.py pyproject.toml \( -name '*.[ch]' -o -name '*.lua' -o -name '*.toml' \
    -o -name setup.py \) -not -path 'csrc/cli/*' 2>/dev/null))
PYTHON_STAMP = .venv/.tidegate-built
python: $(PYTHON_STAMP) ## the Python package, in place, in .venv
$(PYTHON_STAMP): $(PYTHON_SRC) .ci/requirements.txt
	@test -x $(PYTHON) || .ci/setup test
	$(call SAY,PYTHON,.venv)
	$(Q)CFLAGS="$$CFLAGS -Werror" $(PYTHON) -m pip install -qq --no-build-isolation --no-deps --editable .
	@touch $@

# Everything that others need; what stands in /etc is whose site it is. systemd and tmpfiles.d read below /usr and
# /usr/local alike.
INSTALLED = $(DESTDIR)$(PREFIX)
install: lib programs ## copy library, headers, programs, manual and units under PREFIX (DESTDIR is honoured)
	install -d $(INSTALLED)/lib/pkgconfig $(INSTALLED)/include $(INSTALLED)/bin $(INSTALLED)/share/man/man1 \
	    $(INSTALLED)/lib/systemd/system $(INSTALLED)/lib/tmpfiles.d $(INSTALLED)/share/doc/tidegate
	install -m 644 $(B)/lib/libtidegate.a $(INSTALLED)/lib/
	install -m 755 $(B)/lib/libtidegate.so.0 $(INSTALLED)/lib/
	ln -sf libtidegate.so.0 $(INSTALLED)/lib/libtidegate.so
	install -m 644 $(B)/lib/pkgconfig/tidegate.pc $(B)/lib/pkgconfig/tidegate-fcgx.pc $(INSTALLED)/lib/pkgconfig/
	install -m 644 csrc/include/tidegate.h fcgi/fcgx/tidegate_fcgx.h $(INSTALLED)/include/
	install -m 755 $(PROGRAMS) $(B)/bin/tidegate-cgi $(INSTALLED)/bin/
	install -m 644 docs/man/*.1 $(INSTALLED)/share/man/man1/
	for page in docs/*.md docs/coming-from/*.md docs/rules.schema.json; do \
	    install -D -m 644 $$page $(INSTALLED)/share/doc/tidegate/$${page#docs/} || exit 1; done
	sed -i 's|](\.\./examples/|](examples/|g' $(INSTALLED)/share/doc/tidegate/*.md
	for file in $$(find examples -type f ! -path '*/__pycache__/*' ! -path 'examples/demo/*'); do \
	    if [ -x $$file ]; then mode=755; else mode=644; fi; \
	    install -D -m $$mode $$file $(INSTALLED)/share/doc/tidegate/$$file || exit 1; done
	for unit in examples/systemd/*.service examples/systemd/*.socket; do \
	    sed -e 's|/usr/bin/|$(PREFIX)/bin/|; s|/usr/share/|$(PREFIX)/share/|' $$unit \
	        > $(INSTALLED)/lib/systemd/system/$${unit##*/}; done
	install -m 644 examples/systemd/tidegate.conf $(INSTALLED)/lib/tmpfiles.d/

deb: lib programs ## a Debian package of what `make install` lays out, in build/
	@rm -rf $(B)/deb
	@$(MAKE) --no-print-directory -s install PREFIX=/usr DESTDIR=$(abspath $(B))/deb
	@packaging/debian/build $(abspath $(B))/deb $(VERSION) $(B)

# ---- testing ---------------------------------------------------------------------------------------------------------

c-tests: $(TEST_BIN) ## the C test programs in build/tests; VARIANT=asan or tsan: under sanitizers

# Which archives a test needs follows from where it lies and what it says.
archives = $(if $(filter tests/c/fcgi/% tests/fcgi/%,$(1)),$(B)/lib/fcgi-room.a) \
    $(B)/lib/$(if $(filter $(1),$(HOOKED_SRC)),libtidegate-hooks.a,libtidegate.a)
define test_rule
$(call test_bin,$(1)): $(1) $(call archives,$(1))
	@mkdir -p $$(@D)
	$$(call SAY,CC,$$@)
	$$(Q)$$(COMPILE) $(if $(filter $(1),$(HOOKED_SRC)),-DTG_TEST_HOOKS) $(1) $(call archives,$(1)) -lcmocka $$(LDFLAGS) \
	    $$(TG_LDLIBS) -o $$@
endef
$(foreach source,$(TEST_SRC),$(eval $(call test_rule,$(source))))

c-tests-asan c-tests-tsan: c-tests-%:
	@$(MAKE) --no-print-directory VARIANT=$* c-tests

test: setup ## set up, build, run every test
	@$(MAKE) --no-print-directory -j2 build c-tests c-tests-asan c-tests-tsan
	$(PYTHON) -m pytest tests $(PYTEST)

.PHONY: test-debian13
test-debian13: ## build and test in a Debian 13 root of its own, made once (as root)
	@.ci/setup test
	@B=$(B) .ci/debian13

# Coverage-guided runs over whatever reads bytes from outside: SECONDS each.
FUZZ_SECONDS ?= 20
fuzz: setup ## run each fuzz target for FUZZ_SECONDS (20)
	@$(MAKE) --no-print-directory -j2 fuzz-programs
	@set -e; for target in $(FUZZ_BIN); do echo "== $$target"; mkdir -p $$target.corpus; \
	    kept=tests/fuzz/corpus/$${target##*/fuzz_}; test -d $$kept || kept=; \
	    $$target -max_total_time=$(FUZZ_SECONDS) -timeout=20 -print_final_stats=1 -artifact_prefix=$$target. $$target.corpus $$kept \
	        2>&1 | grep -E '^(==|SUMMARY|stat::number_of_executed|.*ERROR)' || true; \
	    test -z "$$(ls $$target.crash-* $$target.timeout-* $$target.oom-* 2>/dev/null)"; done

fuzz-programs: $(FUZZ_BIN)
FUZZ_COMPILE = clang $(TG_CPPFLAGS) $(WARN) -O1 -g -pthread -fno-sanitize-recover=all $(NOTED)
FUZZ_OBJ := $(patsubst %.c,$(B)/fuzz/obj/%.o,$(LIB_SRC) $(FCGI_ROOM_SRC))
$(B)/fuzz/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call SAY,CLANG,$@)
	$(Q)$(FUZZ_COMPILE) -fsanitize=fuzzer-no-link,address,undefined -c $< -o $@
$(B)/fuzz/room.a: $(FUZZ_OBJ)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^
$(B)/fuzz/%: tests/fuzz/%.c $(B)/fuzz/room.a
	@mkdir -p $(@D)
	$(call SAY,CLANG,$@)
	$(Q)$(FUZZ_COMPILE) -fsanitize=fuzzer,address,undefined $< $(B)/fuzz/room.a $(LDFLAGS) $(TG_LDLIBS) -o $@

# ---- what people get ---------------------------------------------------------------------------------------------------

docs: python ## the documentation site, in build/docs/html
	$(Q)$(PYTHON) -m sphinx -q -W --keep-going -d $(B)/docs/trees docs $(B)/docs/html
	@echo "open $(B)/docs/html/index.html"

dist: setup ## a source distribution and a wheel for this system, in build/dist
	$(Q)$(PYTHON) -c "from setuptools import build_meta; build_meta.build_sdist('$(B)/dist')" > /dev/null
	$(Q)$(PYTHON) -m pip wheel -q --no-build-isolation --no-deps --wheel-dir $(B)/dist $(B)/dist/tidegate-$(VERSION).tar.gz
	@ls $(B)/dist

wheels: ## a wheel with its libraries in it, made in the Debian 13 root (as root), in build/wheels
	@.ci/setup test
	@B=$(B) .ci/debian13 wheels

# ---- seeing and measuring --------------------------------------------------------------------------------------------

demo: ## nginx, FastAPI and Flask under one limit; stays up until Ctrl-C (ONCE=1: leave after the table)
	@.ci/setup demo
	@$(MAKE) --no-print-directory -j2 --silent build
	@examples/demo/run $(if $(ONCE),--once) $(DEMO)

bench: ## print the measured table of budgets beside limits, throttled-py and slowapi
	@.ci/setup bench
	@$(MAKE) --no-print-directory -j2 --silent build bench-programs
	@$(PYTHON) bench/table.py $(BENCH)

bench-programs: $(BENCH_BIN) $(B)/bench/empty_method.so
$(B)/bench/%: bench/%.c $(B)/lib/libtidegate.a $(if $(FCGI_ROOM_SRC),$(B)/lib/fcgi-room.a)
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(COMPILE) $< $(if $(FCGI_ROOM_SRC),$(B)/lib/fcgi-room.a) $(B)/lib/libtidegate.a $(LDFLAGS) $(TG_LDLIBS) -o $@

# The peer's own server library, for this one program.
$(B)/bench/fcgi_libfcgi: bench/fcgi_libfcgi.c
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(COMPILE) $< $(LDFLAGS) -lfcgi -pthread -o $@

bench-fcgi: ## the daemon beside libfcgi, nginx's limit_req and php-fpm (a few minutes; on a quiet machine)
	@.ci/setup bench
	@$(MAKE) --no-print-directory -j2 --silent build bench-programs
	@$(PYTHON) bench/fcgi_peers.py $(B) $(BENCH)
	@$(PYTHON) bench/fcgi_relay.py $(B) --rounds 11 $(BENCH)

# As anybody would build it, or what it loads would be no fair yardstick.
$(B)/bench/cgi_constant: bench/cgi_constant.c
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(CC) $(WARN) $(CFLAGS) $(LDFLAGS) $< -o $@

bench-python: ## FastAPI and Flask with a limit beside slowapi, fastapi-limiter and flask-limiter
	@.ci/setup bench
	@$(MAKE) --no-print-directory -j2 --silent build
	@$(PYTHON) bench/python_peers.py $(BENCH)

$(B)/bench/empty_method.so: bench/empty_method.c
	@mkdir -p $(@D)
	$(call SAY,CC,$@)
	$(Q)$(CC) $(TG_CFLAGS) -fvisibility=default -shared \
	    -I$$(/usr/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') $< -o $@

bench-instructions: ## count instructions of one decision with callgrind: the same on every machine
	@.ci/setup bench
	@$(MAKE) --no-print-directory -j2 --silent bench-programs
	@$(PYTHON) bench/instructions.py $(B)/bench/c_decision

bench-redis: ## decisions through Redis beside a hiredis loop, redis-py, coredis, limits and throttled-py
	@.ci/setup bench
	@$(MAKE) --no-print-directory -j2 --silent build bench-programs
	@$(PYTHON) bench/redis_python.py $(B)/bench $(BENCH)

clean: ## remove what was built (not .venv)
	rm -rf $(B) python/tidegate/*.so
	rm -f $(PYTHON_STAMP)

-include $(patsubst %.o,%.d,$(LIB_OBJ) $(HOOKS_OBJ) $(FCGI_OBJ) $(CLI_OBJ) $(CGI_OBJ) $(FUZZ_OBJ)) $(TEST_BIN:=.d) $(FUZZ_BIN:=.d) $(BENCH_BIN:=.d)
