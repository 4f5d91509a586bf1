/* One spelling for each path, host and method, so that whatever reaches one handler is matched and counted as one.
 * Must not enter: patterns, policies. */
#ifndef TG_PATH_H
#define TG_PATH_H

#include "base/base.h"

#define TG_PATH_BYTES_MAX 4096
/* The path as it is matched and counted: an absolute-form target's scheme and host and the query cut off, %XX decoded
 * once, '//' folded, '.' and '..' resolved (never above the root), no trailing '/' but the root's. "%2F" is a '/'
 * like any other: the servers in front of our faces route it so, and a path that is routed one way and counted
 * another is a way around a limit. A path that stays too long keeps its beginning and its end, with 0xff and the
 * digest of all of it between them, so that patterns still meet it. Returns the bytes written. */
size_t tg__path_normalise(tg_text raw, char normal[TG_PATH_BYTES_MAX]);
/* The same; without `resolve` empty and dot segments are left where they stand, which is what a server that does not
 * resolve them routes by. `differs` tells whether the two spellings differ. */
size_t tg__path_spell(tg_text raw, bool resolve, char spelt[TG_PATH_BYTES_MAX], bool *differs);

#define TG_HOST_BYTES_MAX 255
/* Lower case, no port, no dot at the end: "Example.com.:8080" is "example.com". Returns the bytes written; 0: none
 * given, or longer than any host's name. */
size_t tg__host_normalise(tg_text raw, char normal[TG_HOST_BYTES_MAX]);

#define TG_METHOD_BYTES_MAX 32
/* Upper case, HEAD as GET: the same handler answers both. Returns the bytes written; 0: none given, or too long. */
size_t tg__method_normalise(tg_text raw, char normal[TG_METHOD_BYTES_MAX]);

#endif
