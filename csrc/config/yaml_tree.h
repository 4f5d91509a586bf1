/* YAML text to a tree of plain values, each knowing where it stands; and errors that say so.
 * Must not enter: what a rules file means. libyaml is spoken to in yaml_tree.c only. */
#ifndef TG_YAML_TREE_H
#define TG_YAML_TREE_H

#include "config/config.h" /* tg_place */
#include "config/config_arena.h"

/* The text being read and whom to tell. */
typedef struct tg_source {
    tg_text text;
    const char *path;
    tg_arena *arena;
    tg_error *error; /* may be NULL */
    tg_place *last;  /* where a place was looked for last: the next lies behind it most times. May be NULL */
} tg_source;

typedef enum tg_node_kind { TG_NODE_SCALAR, TG_NODE_LIST, TG_NODE_MAP } tg_node_kind;

typedef struct tg_node {
    tg_node_kind kind;
    bool plain;            /* scalar: not quoted */
    size_t at;             /* byte offset in the text where it begins */
    size_t end;            /* and where it ends */
    tg_text text;          /* scalar: its value */
    size_t count;          /* list, map: how many entries */
    struct tg_node *first; /* list: the entries; map: key, value, key, value ... */
    struct tg_node *next;
} tg_node;

/* One document of scalars, lists and maps: no anchors, aliases, tags, merge keys; 1 MiB, depth 16. *root is NULL
 * where the document is empty. TG_E_CONFIG with line and column, TG_E_NOMEM. Whether keys repeat is for the reader to
 * see, who knows which there are. */
tg_status tg__yaml_read(const tg_source *source, tg_node **root);

/* Fills the error with "PATH:LINE:COLUMN: ...". Returns TG_E_CONFIG. */
tg_status tg__source_error(const tg_source *source, size_t at, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Line and column of a byte of the text. */
tg_place tg__source_place(const tg_source *source, size_t at);
unsigned tg__source_line(const tg_source *source, size_t at);
/* Where byte `offset` of a scalar's value stands in the text: exact for scalars on one line without escapes, else
 * where the scalar begins. */
size_t tg__node_at(const tg_source *source, const tg_node *scalar, size_t offset);
/* A value that is not there: "key:" with nothing behind it, "~", "null". */
bool tg__node_is_nothing(const tg_node *node);
/* "a list", "nothing", "\"five\"": what was found, for messages. */
const char *tg__node_show(const tg_node *node, char *buffer, size_t size);

#endif
