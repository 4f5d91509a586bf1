/* The rules file as it is written, checked and held; and which of its policies a request meets.
 * Must not enter: stores, counting, answers. Knows libyaml; nothing else does. */
#ifndef TG_CONFIG_H
#define TG_CONFIG_H

#include "base/base.h"
#include "http/http.h"     /* how an answer looks is the file's to say */
#include "identity/path.h" /* paths are matched as they are counted */
#include "identity/roll.h"

typedef struct tg_place {
    size_t at;
    unsigned line, column; /* from 1, in bytes */
} tg_place;

typedef struct tg_match tg_match; /* parsed `match`: paths with '*', methods, hosts */

/* What one request takes, beyond what the face says (which this multiplies). */
typedef struct tg_cost {
    enum { TG_COST_FIXED, TG_COST_HEADER, TG_COST_QUERY, TG_COST_RESPONSE } source;
    uint64_t units;      /* fixed; of a header or query that is not there; of a response until it comes */
    uint64_t least, most;
    tg_header_name header;
    tg_text query;
} tg_cost;

typedef enum tg_mode { TG_MODE_ENFORCE = 0, TG_MODE_SHADOW, TG_MODE_CHALLENGE } tg_mode;
typedef enum tg_log { TG_LOG_NONE = 0, TG_LOG_REFUSED, TG_LOG_ALL } tg_log;

/* The statuses of answers that count; none: all do. */
typedef struct tg_counted {
    bool some;
    uint8_t statuses[500 / 8 + 1]; /* a bit for each of 100 to 599 */
} tg_counted;

/* `pause_when`: while more than so many of a hundred answers are errors, nobody is refused. */
typedef struct tg_pause {
    uint64_t period_us; /* 0: there is none */
    uint64_t least;     /* answers within the period, or nothing is said of their rate */
    unsigned percent;
} tg_pause;

/* "error_rate > 50% over 1m min 20". TG_E_RULE marks the word, as tg_rules_parse does. */
tg_status tg__pause_parse(tg_text text, tg_pause *pause, tg_error *error);

/* Rules that hold for clients of one plan. */
typedef struct tg_plan {
    tg_text name;
    char *rules_text;
    size_t rule_count;
    tg_place place; /* of its rules */
} tg_plan;

#define TG_PLANS_MAX 32

typedef struct tg_policy {
    char name[TG_NAME_BYTES_MAX + 1];
    const char *file;       /* which it stands in */
    unsigned line;          /* where it begins there */
    bool also;              /* does not end the search */
    bool count_denied;      /* what it refuses counts too */
    tg_match *match;        /* NULL: every request */
    tg_rule rules[TG_RULES_MAX];
    size_t rule_count;      /* of `rules` */
    size_t rules_most;      /* of `rules` or any plan */
    char *rules_text;       /* as written */
    tg_text *by;            /* default: "ip" */
    size_t by_count;
    tg_on_failure on_store_failure;
    unsigned local_percent; /* of TG_FAIL_LOCAL */
    tg_on_full on_full;
    tg_missing missing_identity;
    tg_style style;         /* of the answer when this policy is the one reported */
    tg_mode mode;
    tg_log log;
    uint64_t log_sample;    /* one of so many; 0 as 1 */
    tg_counted counted;
    tg_pause pause;
    uint32_t watch;         /* what tells the policy, whatever is reloaded, while its answers are watched */
    tg_roll exempt, deny;
    tg_cost cost;
    tg_plan *plans;         /* `rules` are those of clients whose plan is not among them */
    size_t plan_count;
    tg_header_name plan_header; /* length 0: the application says which plan it is */
    tg_place rule_place[TG_RULES_MAX]; /* line 0: of those that a default plan lends */
    tg_place by_place[TG_DIMENSIONS_MAX], route_place, settle_place; /* for what a face cannot tell; line 0: none */
} tg_policy;

#define TG_CONFIG_FILES_MAX 16 /* the file and all that it includes */
#define TG_INCLUDE_DEPTH_MAX 4
enum { TG_MARKS = 5 }; /* numbers that tell one content of a file from the next: device, inode, size, time of change */

typedef struct tg_config {
    char *path;
    char *files[TG_CONFIG_FILES_MAX]; /* that were read, `path` first */
    size_t file_count;
    uint64_t marks[TG_CONFIG_FILES_MAX][TG_MARKS]; /* of each, as it was read */
    char *store;         /* NULL: not named */
    const char *store_file; /* in which it stands, and where */
    unsigned store_line;
    char *secret;        /* of the store; NULL: not named */
    unsigned secret_line;
    unsigned private_kinds; /* TG_PRIVATE_ bits */
    char space[TG_NAME_BYTES_MAX + 1];
    tg_text *trusted_proxies;
    size_t trusted_proxy_count;
    char *client_header; /* NULL: default */
    char *user_header;   /* NULL: none */
    tg_roll exempt, deny; /* whatever they ask for */
    tg_style style;       /* of answers that no policy gives */
    tg_policy *policies;  /* the last may be that of `unmatched` */
    size_t policy_count;
} tg_config;

/* The files that a reading looked at, also one that failed: what may have to change before it succeeds. */
typedef struct tg_files {
    char *paths[TG_CONFIG_FILES_MAX];
    uint64_t marks[TG_CONFIG_FILES_MAX][TG_MARKS];
    size_t count;
} tg_files;

#define TG_CONFIG_BYTES_MAX (1u << 20)
#define TG_CONFIG_DEPTH_MAX 16
#define TG_POLICIES_MAX 1024

/* Every error is TG_E_CONFIG with line and column, the message "PATH:LINE:COLUMN: found, expected". Everything is
 * checked here that can be: rule texts, `by`, networks, names, duplicates, unknown keys (with the nearest known one). */
tg_status tg__config_read(const char *path, tg_config **config, tg_error *error);
/* The same; `files` receives what was looked at, to be closed whatever the status. */
tg_status tg__config_read_files(const char *path, tg_config **config, tg_files *files, tg_error *error);
void tg__files_close(tg_files *files);
tg_status tg__config_parse(tg_text yaml, const char *path, tg_config **config, tg_error *error);
/* Compiled rules (compiled.h), which tg__config_read takes as well. Errors in what they say name the source. */
tg_status tg__config_parse_compiled(tg_text bytes, const char *path, tg_config **config, tg_error *error);
/* The whole text of a file, to be freed. */
tg_status tg__config_text(const char *path, char **text, size_t *length, uint64_t mark[TG_MARKS], tg_error *error);
struct stat;
void tg__config_mark(const struct stat *file, uint64_t mark[TG_MARKS]);
void tg__config_close(tg_config *config);

/* Indexes of the policies that apply: the first match, and matches marked `also` (before or after it). Returns how
 * many, at most TG_LIMITERS_MAX. Never allocates. */
size_t tg__config_match(const tg_config *config, const tg_request *request, size_t found[TG_LIMITERS_MAX]);

#endif
