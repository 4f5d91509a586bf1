/* Places in a text, and what a node shows of itself: for trees wherever they come from.
 * Must not enter: libyaml, what a rules file means. */
#include "config/yaml_tree.h"

#include <stdio.h>

/* ---- places ---- */

tg_place
tg__source_place(const tg_source *source, size_t at)
{
    tg_place place = { .line = 1, .column = 1 };
    if (source->last && source->last->line && source->last->at <= at)
        place = *source->last;
    for (; place.at < at && place.at < source->text.length; place.at++) {
        place.column++;
        if (source->text.data[place.at] == '\n') {
            place.line++;
            place.column = 1;
        }
    }
    if (source->last)
        *source->last = place;
    return place;
}

unsigned
tg__source_line(const tg_source *source, size_t at)
{
    return tg__source_place(source, at).line;
}

tg_status
tg__source_error(const tg_source *source, size_t at, const char *format, ...)
{
    char what[400];
    if (!source->error)
        return TG_E_CONFIG;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    const tg_place place = tg__source_place(source, at);
    /* Of a long path the end is shown: that is where files differ. */
    const size_t length = strlen(source->path);
    const char *path = length > 160 ? source->path + length - 157 : source->path;
    tg__error(source->error, TG_E_CONFIG, "%s%s:%u:%u: %s", length > 160 ? "..." : "", path, place.line,
              place.column, what);
    source->error->line = place.line;
    source->error->column = place.column;
    return TG_E_CONFIG;
}

size_t
tg__node_at(const tg_source *source, const tg_node *scalar, size_t offset)
{
    const size_t start = scalar->at + (scalar->plain ? 0 : 1);
    const bool as_written = offset <= scalar->text.length && start + scalar->text.length <= scalar->end &&
                            scalar->end <= source->text.length && scalar->text.length > 0 &&
                            memcmp(source->text.data + start, scalar->text.data, scalar->text.length) == 0;
    return as_written ? start + offset : scalar->at;
}

bool
tg__node_is_nothing(const tg_node *node)
{
    return node->kind == TG_NODE_SCALAR && node->plain &&
           (node->text.length == 0 || tg__text_is(node->text, "~") || tg__text_is_nocase(node->text, "null"));
}

const char *
tg__node_show(const tg_node *node, char *buffer, size_t size)
{
    if (node->kind == TG_NODE_LIST)
        return "a list";
    if (node->kind == TG_NODE_MAP)
        return "a mapping";
    if (tg__node_is_nothing(node))
        return "nothing";
    char shown[80];
    snprintf(buffer, size, "\"%s\"", tg__text_show(node->text, shown, sizeof shown));
    return buffer;
}
