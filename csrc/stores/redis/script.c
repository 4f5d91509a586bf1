/* The scripts: their texts are in the library, put together once.
 * Must not enter: what they mean; that is said in the .lua files. */
#include "stores/redis/redis.h"

#include <stdlib.h>

/* Included by the assembler, so that a build needs no further tool and a script is edited as what it is. The path is
 * relative to where the compiler is called: the top of the tree, by make as by setuptools. */
#if defined(__APPLE__)
#define RODATA ".section __TEXT,__const\n"
#define TEXT_END ".text\n"
#define SYMBOL(name) "_" name
#else
#define RODATA ".section .rodata\n"
#define TEXT_END ".previous\n"
#define SYMBOL(name) name
#endif
#define EMBED(name)                                                                                                    \
    __asm__(RODATA ".globl " SYMBOL("tg__lua_" #name) "\n" ".globl " SYMBOL("tg__lua_" #name "_end") "\n"              \
            SYMBOL("tg__lua_" #name) ":\n" ".incbin \"csrc/stores/redis/" #name ".lua\"\n"                             \
            SYMBOL("tg__lua_" #name "_end") ":\n" ".byte 0\n" TEXT_END);                                               \
    extern const char tg__lua_##name[] __attribute__((visibility("hidden")));                                          \
    extern const char tg__lua_##name##_end[] __attribute__((visibility("hidden")))

EMBED(common);
EMBED(one);
EMBED(rules);
EMBED(judge);
EMBED(hit);
EMBED(mixed);
EMBED(fixed_window);
EMBED(fixed_window_one);
EMBED(fixed_window_rule);
EMBED(sliding_log);
EMBED(sliding_counter);
EMBED(sliding_counter_one);
EMBED(sliding_counter_rule);
EMBED(bucket);
EMBED(bucket_one);
EMBED(bucket_rule);
EMBED(more);
EMBED(mixed_more);
EMBED(fixed_window_more);
EMBED(sliding_log_more);
EMBED(sliding_counter_more);
EMBED(bucket_more);
EMBED(hold);
EMBED(refund);
EMBED(settle);
EMBED(check);

#define PIECE(name) { tg__lua_##name, (size_t)(tg__lua_##name##_end - tg__lua_##name) }

static tg_text texts[TG__SCRIPTS];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool complete;

static bool
assemble(tg_script script, const tg_text *pieces, size_t count)
{
    size_t length = 0;
    for (size_t i = 0; i < count; i++)
        length += pieces[i].length;
    char *text = malloc(length);
    if (!text)
        return false;
    texts[script] = (tg_text){ text, length };
    for (size_t i = 0; i < count; i++) {
        memcpy(text, pieces[i].data, pieces[i].length);
        text += pieces[i].length;
    }
    return true;
}

#define ASSEMBLE(script, ...)                                                                                          \
    assemble(script, (const tg_text[]){ __VA_ARGS__ }, sizeof((const tg_text[]){ __VA_ARGS__ }) / sizeof(tg_text))
#define ONE(algorithm) \
    PIECE(common), PIECE(algorithm), PIECE(one), PIECE(algorithm##_one), PIECE(rules), PIECE(algorithm##_rule)
#define ANY                                                                                                            \
    PIECE(common), PIECE(rules), PIECE(fixed_window), PIECE(fixed_window_rule), PIECE(sliding_log),                    \
        PIECE(sliding_counter), PIECE(sliding_counter_rule), PIECE(bucket), PIECE(bucket_rule), PIECE(mixed)
#define MORE                                                                                                           \
    PIECE(more), PIECE(fixed_window_more), PIECE(sliding_log_more), PIECE(sliding_counter_more), PIECE(bucket_more),   \
        PIECE(mixed_more)

static void
assemble_all(void)
{
    complete = ASSEMBLE(TG__SCRIPT_HIT_FIXED, ONE(fixed_window), PIECE(judge), PIECE(hit)) &&
               ASSEMBLE(TG__SCRIPT_HIT_LOG, PIECE(common), PIECE(rules), PIECE(sliding_log), PIECE(judge), PIECE(hit)) &&
               ASSEMBLE(TG__SCRIPT_HIT_COUNTER, ONE(sliding_counter), PIECE(judge), PIECE(hit)) &&
               ASSEMBLE(TG__SCRIPT_HIT_BUCKET, ONE(bucket), PIECE(judge), PIECE(hit)) &&
               ASSEMBLE(TG__SCRIPT_HIT_MIXED, ANY, PIECE(judge), PIECE(hit)) &&
               ASSEMBLE(TG__SCRIPT_HIT_MORE, ANY, MORE, PIECE(judge), PIECE(hold), PIECE(hit)) &&
               ASSEMBLE(TG__SCRIPT_REFUND, ANY, MORE, PIECE(refund)) &&
               ASSEMBLE(TG__SCRIPT_SETTLE, ANY, MORE, PIECE(settle));
}

tg_status
tg__redis_scripts_init(tg_error *error)
{
    pthread_once(&once, assemble_all);
    return complete ? TG_OK : tg__error(error, TG_E_NOMEM, "redis: the scripts' texts");
}

tg_text
tg__redis_script(tg_script script)
{
    return texts[script];
}

tg_text
tg__redis_check_script(void)
{
    return (tg_text)PIECE(check);
}

tg_script
tg__redis_hit_script(unsigned algorithms)
{
    switch (algorithms) {
    case 1u << TG_FIXED_WINDOW:
        return TG__SCRIPT_HIT_FIXED;
    case 1u << TG_SLIDING_LOG:
        return TG__SCRIPT_HIT_LOG;
    case 1u << TG_SLIDING_COUNTER:
        return TG__SCRIPT_HIT_COUNTER;
    default:
        return (algorithms & ~(1u << TG_TOKEN_BUCKET | 1u << TG_LEAKY_BUCKET)) == 0 ? TG__SCRIPT_HIT_BUCKET
                                                                                    : TG__SCRIPT_HIT_MIXED;
    }
}
