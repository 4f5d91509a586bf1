/* The rules file as it is written, checked and held; and which of its policies a request meets.
 * Must not enter: stores, counting, answers. Knows libyaml; nothing else does. */
#ifndef TG_CONFIG_H
#define TG_CONFIG_H

#include "base/base.h"
#include "http/http.h"     /* how an answer looks is the file's to say */
#include "identity/path.h" /* paths are matched as they are counted */

typedef struct tg_match tg_match; /* parsed `match`: paths with '*', methods, hosts */

typedef struct tg_policy {
    char name[TG_NAME_BYTES_MAX + 1];
    unsigned line;          /* where it begins in the file */
    bool also;              /* does not end the search */
    tg_match *match;        /* NULL: every request */
    tg_rule rules[TG_RULES_MAX];
    size_t rule_count;
    char *rules_text;       /* as written */
    tg_text *by;            /* default: "ip" */
    size_t by_count;
    tg_on_failure on_store_failure;
    tg_on_full on_full;
    tg_missing missing_identity;
    tg_style style;         /* of the answer when this policy is the one reported */
} tg_policy;

typedef struct tg_config {
    char *path;
    char *store;         /* NULL: not named */
    unsigned store_line; /* where it stands in the file */
    char space[TG_NAME_BYTES_MAX + 1];
    tg_text *trusted_proxies;
    size_t trusted_proxy_count;
    char *client_header; /* NULL: default */
    char *user_header;   /* NULL: none */
    tg_policy *policies;
    size_t policy_count;
} tg_config;

#define TG_CONFIG_BYTES_MAX (1u << 20)
#define TG_CONFIG_DEPTH_MAX 16
#define TG_POLICIES_MAX 1024

/* Every error is TG_E_CONFIG with line and column, the message "PATH:LINE:COLUMN: found, expected". Everything is
 * checked here that can be: rule texts, `by`, networks, names, duplicates, unknown keys (with the nearest known one). */
tg_status tg__config_read(const char *path, tg_config **config, tg_error *error);
tg_status tg__config_parse(tg_text yaml, const char *path, tg_config **config, tg_error *error);
void tg__config_close(tg_config *config);

/* Indexes of the policies that apply: the first match, and matches marked `also` (before or after it). Returns how
 * many, at most TG_LIMITERS_MAX. Never allocates. */
size_t tg__config_match(const tg_config *config, const tg_request *request, size_t found[TG_LIMITERS_MAX]);

#endif
