/* One spelling for each path, so that whatever reaches one handler is matched and counted as one.
 * Must not enter: patterns, policies. */
#ifndef TG_PATH_H
#define TG_PATH_H

#include "base/base.h"

#define TG_PATH_BYTES_MAX 4096
/* The path as it is matched and counted: an absolute-form target's scheme and host and the query cut off, %XX decoded
 * once, '//' folded, '.' and '..' resolved (never above the root), no trailing '/' but the root's. "%2F" is a '/' like any
 * other: the servers in front of our faces route it so, and a path that is routed one way and counted another is a way
 * around a limit. A path that stays too long keeps its beginning and its end, with 0xff and the digest of all of it between
 * them, so that patterns still meet it. Returns the bytes written. */
size_t tg__path_normalise(tg_text raw, char normal[TG_PATH_BYTES_MAX]);

#endif
