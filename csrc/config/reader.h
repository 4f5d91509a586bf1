/* What the readers of a rules file share: keys and values out of the tree, each fault with its place.
 * Must not enter: what any key means. */
#ifndef TG_READER_H
#define TG_READER_H

#include "config/config.h"
#include "config/yaml_tree.h"

typedef struct tg_reader {
    tg_source source;
    tg_arena *kept; /* what the config points to; the tree lives in source.arena and dies with the reading */
    tg_config *config;
    tg_policy defaults;
    const char *file; /* the path, kept */
    unsigned depth;   /* of includes */
    struct tg_whole *whole;
} tg_reader;

/* The keys that a mapping may have, and those that later versions know. */
typedef struct tg_keys {
    const char *where;
    const char *const *known; /* NULL-terminated, at most TG_KEYS_MAX */
    const char *const *later;
} tg_keys;

enum { TG_KEYS_MAX = 32 };

tg_status tg__read_no_memory(const tg_reader *r);
/* Its place in a NULL-terminated list, or SIZE_MAX. */
size_t tg__word_index(tg_text word, const char *const *words);
/* Sorts a mapping's values by key: values[i] belongs to known[i], NULL where it is not given. Every key is known and
 * stands there once, or it is an error. */
tg_status tg__read_keys(const tg_reader *r, const tg_node *map, const tg_keys *allowed,
                        const tg_node *values[TG_KEYS_MAX]);
/* A scalar with something in it. `what` was expected. */
tg_status tg__want_text(const tg_reader *r, const tg_node *node, const char *what);
/* A list of such, or one alone; the next of them by tg__read_after. */
tg_status tg__want_entries(const tg_reader *r, const tg_node *node, const char *what, const tg_node **first,
                           size_t *count);
const tg_node *tg__read_after(const tg_node *list, const tg_node *entry);
tg_status tg__read_kept(const tg_reader *r, tg_text text, tg_text *kept);
tg_status tg__read_string(const tg_reader *r, const tg_node *node, const char *what, char **kept);
/* 1 to 64 of A-Z a-z 0-9 _ . - */
tg_status tg__read_name(const tg_reader *r, const tg_node *node, const char *what, char name[TG_NAME_BYTES_MAX + 1]);
/* One of a few words; *choice is its place in the list. */
tg_status tg__read_choice(const tg_reader *r, const tg_node *node, const char *const *words, size_t *choice);
tg_status tg__read_flag(const tg_reader *r, const tg_node *node, bool *flag);
tg_status tg__read_number(const tg_reader *r, const tg_node *node, uint64_t least, uint64_t most, uint64_t *number);
/* What another room's parser found wrong, at its place in the file. */
tg_status tg__read_fault(const tg_reader *r, const tg_node *scalar, const tg_error *fault, bool placed);

/* ---- settings.c: what stands in `defaults` and in each policy alike ---- */

/* The first keys of both mappings, in this order; TG_SETTINGS_WORDS begins their lists of known keys. */
enum {
    TG_SETTING_ON_FAILURE,
    TG_SETTING_ON_FULL,
    TG_SETTING_MISSING,
    TG_SETTING_HEADERS,
    TG_SETTING_BODY,
    TG_SETTING_RESET,
    TG_SETTING_TEXTS,
    TG_SETTING_STATUSES,
    TG_SETTING_MODE,
    TG_SETTING_LOG,
    TG_SETTING_PAUSE,
    TG_SETTINGS
};
#define TG_SETTINGS_WORDS                                                                                              \
    "on_store_failure", "on_full", "missing_identity", "headers", "body", "reset_format", "texts", "statuses", \
        "mode", "log_decisions", "pause_when"
tg_status tg__read_settings(const tg_reader *r, const tg_node *const *values, tg_policy *policy);

tg_status tg__read_roll(const tg_reader *r, const tg_node *node, tg_roll *roll);

/* ---- policy.c ---- */

/* `default_name`: of a policy that need not have one; else NULL. */
tg_status tg__read_policy(const tg_reader *r, const tg_node *node, const char *default_name, tg_policy *policy);

#endif
