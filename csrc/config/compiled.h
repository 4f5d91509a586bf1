/* Compiled rules: what the YAML parser made of a rules file and its includes, written down, so that a process that lives
 * for one request need not parse YAML. What it means is read by the same reader, from the same tree.
 * Must not enter: what any key means, libyaml. */
#ifndef TG_COMPILED_H
#define TG_COMPILED_H

#include "config/yaml_tree.h"

#define TG_COMPILED_BYTES_MAX (32u << 20)
#define TG_COMPILED_VARIABLES_MAX 16

/* ---- writing */

typedef struct tg_bytes {
    char *data;
    size_t length, room;
    bool failed; /* out of memory: what is there is not all */
} tg_bytes;

/* What is noted down while a rules file is read. All zero at first. */
typedef struct tg_recording {
    tg_bytes files, variables, nodes, blob;
    size_t file_count, variable_count, node_count;
} tg_recording;

/* A file, when its text and tree are there. Included ones follow those that include them, as they are read. */
void tg__record_file(tg_recording *recording, const tg_source *source, const uint64_t mark[TG_MARKS], const tg_node *root);
/* A variable of the environment that went in. false: more than TG_COMPILED_VARIABLES_MAX. */
bool tg__record_variable(tg_recording *recording, const char *name, const char *value);
/* All of it as one file's bytes. TG_E_CONFIG: larger than TG_COMPILED_BYTES_MAX; TG_E_NOMEM. */
tg_status tg__recording_write(tg_recording *recording, const char *path, tg_bytes *written, tg_error *error);
void tg__recording_fini(tg_recording *recording);
/* config.c: reads a rules file, noting down what is read. */
tg_status tg__config_record(const char *path, tg_recording *recording, tg_config **config, tg_error *error);

/* ---- reading: the bytes come from outside, every number in them is bounded before use */

typedef struct tg_compiled {
    const char *path; /* of the compiled file, for messages */
    tg_text nodes, blob, variables;
    size_t node_count, variable_count, file_count;
    struct tg_compiled_file {
        tg_text path, text; /* in the blob */
        uint64_t mark[TG_MARKS];
        size_t node; /* where its tree begins, SIZE_MAX: the file is empty */
    } files[TG_CONFIG_FILES_MAX];
} tg_compiled;

bool tg__is_compiled(tg_text bytes);
/* TG_E_CONFIG: damaged, cut off or of another version; says so and what to do. Borrows the bytes. */
tg_status tg__compiled_open(tg_text bytes, const char *path, tg_compiled *compiled, tg_error *error);
/* The tree of one file, in `arena`; *root is NULL where the file was empty. */
tg_status tg__compiled_tree(const tg_compiled *compiled, size_t file, tg_arena *arena, tg_node **root, tg_error *error);
/* The value that a variable had; data is NULL where none is noted. */
tg_text tg__compiled_variable(const tg_compiled *compiled, const char *name);
/* Whether a source is another than it was: by its marks, and where these differ by its text; or a variable that is set has
 * another value. `what` receives its name. A source that is not there or cannot be read says nothing: compiled rules may
 * be shipped alone. */
bool tg__compiled_changed(const tg_compiled *compiled, char *what, size_t what_bytes);

#endif
