# tidegate: everything a person does here. `make help` lists the targets.
CC ?= gcc
CFLAGS ?= -O2 -g
WARN = -std=c11 -Wall -Wextra -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla
PKGS = libsodium yaml-0.1
B ?= build
CPPFLAGS += -D_GNU_SOURCE -Icsrc -Icsrc/include $(shell pkg-config --cflags $(PKGS))
LDLIBS += $(shell pkg-config --libs $(PKGS)) -pthread
TG_CFLAGS = $(CFLAGS) $(WARN) -fPIC -fvisibility=hidden -pthread $(SAN)

LIB_SRC := $(shell find csrc -name '*.c' -not -path 'csrc/cli/*')
LIB_OBJ := $(LIB_SRC:%.c=$(B)/obj/%.o)
TEST_SRC := $(shell find tests/c -name 'test_*.c' 2>/dev/null)
TEST_BIN := $(TEST_SRC:tests/c/%.c=$(B)/tests/%)

.PHONY: all build lib c-tests clean
all: build
lib: $(B)/lib/libtidegate.a
build: lib

$(B)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(TG_CFLAGS) -MMD -MP -c $< -o $@

$(B)/lib/libtidegate.a: $(LIB_OBJ)
	@mkdir -p $(@D)
	rm -f $@ && ar rcs $@ $^

c-tests: $(TEST_BIN)
$(B)/tests/%: tests/c/%.c $(B)/lib/libtidegate.a
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(TG_CFLAGS) -MMD -MP $< $(B)/lib/libtidegate.a -lcmocka $(LDLIBS) -o $@

clean:
	rm -rf $(B)
-include $(LIB_OBJ:.o=.d)
