/* YAML text to a tree of plain values.
 * Must not enter: what a rules file means. */
#include "config/yaml_tree.h"

#include "config/config.h"

#include <stdio.h>
#include <yaml.h>

/* ---- places ---- */

/* libyaml counts characters, we count bytes. Marks go forward with a few steps back, so we walk from the last place:
 * from the beginning each time a megabyte would take minutes. */
typedef struct places {
    tg_text text;
    size_t characters, bytes;
} places;

static size_t
byte_of(places *last, size_t character)
{
    while (last->characters > character) {
        last->bytes--;
        while (last->bytes > 0 && ((unsigned char)last->text.data[last->bytes] & 0xc0) == 0x80)
            last->bytes--;
        last->characters--;
    }
    while (last->characters < character && last->bytes < last->text.length) {
        last->bytes++;
        while (last->bytes < last->text.length && ((unsigned char)last->text.data[last->bytes] & 0xc0) == 0x80)
            last->bytes++;
        last->characters++;
    }
    return last->bytes;
}

/* ---- the tree ---- */

typedef struct level {
    tg_node *container;
    tg_node *last; /* its last child */
} level;

typedef struct builder {
    const tg_source *source;
    places last;
    level levels[TG_CONFIG_DEPTH_MAX];
    size_t depth;
    tg_node *root;
} builder;

static tg_status
no_memory(const tg_source *source)
{
    return tg__error(source->error, TG_E_NOMEM, "%s: out of memory while reading", source->path);
}

static bool
wants_key(const builder *b)
{
    return b->depth > 0 && b->levels[b->depth - 1].container->kind == TG_NODE_MAP &&
           b->levels[b->depth - 1].container->count % 2 == 0;
}

static tg_status
add(builder *b, tg_node_kind kind, const yaml_event_t *event, tg_node **added)
{
    tg_node *node = tg__arena_take(b->source->arena, sizeof *node);
    if (!node)
        return no_memory(b->source);
    node->kind = kind;
    node->at = byte_of(&b->last, event->start_mark.index);
    node->end = byte_of(&b->last, event->end_mark.index);
    if (kind != TG_NODE_SCALAR && wants_key(b))
        return tg__source_error(b->source, node->at, "found %s as a key, expected a word",
                                kind == TG_NODE_LIST ? "a list" : "a mapping");
    if (b->depth == 0) {
        b->root = node;
    } else {
        level *in = &b->levels[b->depth - 1];
        if (in->last)
            in->last->next = node;
        else
            in->container->first = node;
        in->last = node;
        in->container->count++; /* of a map: keys and values, until it ends */
    }
    *added = node;
    return TG_OK;
}

static tg_status
open_container(builder *b, tg_node_kind kind, const yaml_event_t *event)
{
    tg_node *node;
    if (b->depth == TG_CONFIG_DEPTH_MAX)
        return tg__source_error(b->source, byte_of(&b->last, event->start_mark.index),
                                "found more than %d levels of lists and mappings in each other", TG_CONFIG_DEPTH_MAX);
    const tg_status status = add(b, kind, event, &node);
    if (status == TG_OK)
        b->levels[b->depth++] = (level){ node, NULL };
    return status;
}

static void
close_container(builder *b)
{
    tg_node *container = b->levels[--b->depth].container;
    if (container->kind == TG_NODE_MAP)
        container->count /= 2;
}

static tg_status
add_scalar(builder *b, const yaml_event_t *event)
{
    const bool key = wants_key(b);
    tg_node *node;
    const tg_status status = add(b, TG_NODE_SCALAR, event, &node);
    if (status != TG_OK)
        return status;
    node->plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    const tg_text value = { (const char *)event->data.scalar.value, event->data.scalar.length };
    node->text = (tg_text){ tg__arena_copy(b->source->arena, value), value.length };
    if (!node->text.data)
        return no_memory(b->source);
    if (key && node->plain && tg__text_is(node->text, "<<"))
        return tg__source_error(b->source, node->at, "found a merge key \"<<\": write the entries out");
    return TG_OK;
}

/* Anchors and tags make one text mean what another place says: a rules file is read where it stands. */
static tg_status
refuse_decorations(const builder *b, const yaml_event_t *event, const yaml_char_t *anchor, const yaml_char_t *tag)
{
    places here = b->last;
    const size_t at = byte_of(&here, event->start_mark.index);
    char shown[64];
    if (anchor)
        return tg__source_error(b->source, at, "found an anchor \"&%s\": anchors and aliases are not read, write the "
                                               "value out",
                                tg__text_show(tg_text_of((const char *)anchor), shown, sizeof shown));
    if (tag)
        return tg__source_error(b->source, at, "found a tag \"%s\": tags are not read, write the value alone",
                                tg__text_show(tg_text_of((const char *)tag), shown, sizeof shown));
    return TG_OK;
}

static tg_status
take(builder *b, const yaml_event_t *event)
{
    const size_t at = byte_of(&b->last, event->start_mark.index);
    tg_status status = TG_OK;
    char shown[64];
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (b->root)
            return tg__source_error(b->source, at, "found a second document, expected one alone");
        if (event->data.document_start.tag_directives.start != event->data.document_start.tag_directives.end)
            return tg__source_error(b->source, at, "found a %%TAG directive: tags are not read");
        return TG_OK;
    case YAML_ALIAS_EVENT:
        return tg__source_error(b->source, at, "found an alias \"*%s\": anchors and aliases are not read, write the "
                                               "value out (a pattern that begins with * is quoted)",
                                tg__text_show(tg_text_of((const char *)event->data.alias.anchor), shown, sizeof shown));
    case YAML_SCALAR_EVENT:
        status = refuse_decorations(b, event, event->data.scalar.anchor, event->data.scalar.tag);
        return status == TG_OK ? add_scalar(b, event) : status;
    case YAML_SEQUENCE_START_EVENT:
        status = refuse_decorations(b, event, event->data.sequence_start.anchor, event->data.sequence_start.tag);
        return status == TG_OK ? open_container(b, TG_NODE_LIST, event) : status;
    case YAML_MAPPING_START_EVENT:
        status = refuse_decorations(b, event, event->data.mapping_start.anchor, event->data.mapping_start.tag);
        return status == TG_OK ? open_container(b, TG_NODE_MAP, event) : status;
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
        close_container(b);
        return TG_OK;
    case YAML_NO_EVENT:
    case YAML_STREAM_START_EVENT:
    case YAML_STREAM_END_EVENT:
    case YAML_DOCUMENT_END_EVENT:
        return TG_OK;
    }
    return TG_OK;
}

static tg_status
parser_error(builder *b, const yaml_parser_t *parser)
{
    const tg_source *source = b->source;
    if (parser->error == YAML_MEMORY_ERROR)
        return no_memory(source);
    const char *problem = parser->problem ? parser->problem : "not YAML";
    if (parser->error == YAML_READER_ERROR)
        return tg__source_error(source, parser->problem_offset, "found bytes that no YAML text holds: %s", problem);
    const size_t at = byte_of(&b->last, parser->problem_mark.index);
    if (at < source->text.length && source->text.data[at] == '\t')
        return tg__source_error(source, at, "found a tab: YAML is indented with spaces");
    if (!parser->context)
        return tg__source_error(source, at, "not YAML: %s", problem);
    /* Where something was opened that never ends is worth more than where the file does. */
    const size_t begun = byte_of(&b->last, parser->context_mark.index);
    return tg__source_error(source, at, "not YAML: %s that begins in line %u, %s%s", parser->context,
                            tg__source_line(source, begun), problem,
                            strstr(parser->context, "alias") ? " (a pattern that begins with * is quoted)" : "");
}

tg_status
tg__yaml_read(const tg_source *source, tg_node **root)
{
    builder b = { .source = source, .last = { .text = source->text } };
    yaml_parser_t parser;
    yaml_event_t event;
    if (source->text.length > TG_CONFIG_BYTES_MAX)
        return tg__source_error(source, 0, "found %zu bytes, expected at most %u", source->text.length,
                                TG_CONFIG_BYTES_MAX);
    if (!yaml_parser_initialize(&parser))
        return no_memory(source);
    yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser, (const unsigned char *)(source->text.length ? source->text.data : ""),
                                 source->text.length);
    tg_status status = TG_OK;
    bool more = true;
    while (status == TG_OK && more) {
        if (!yaml_parser_parse(&parser, &event)) {
            status = parser_error(&b, &parser);
            break;
        }
        more = event.type != YAML_STREAM_END_EVENT;
        status = take(&b, &event);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    if (status == TG_OK)
        *root = b.root;
    return status;
}
