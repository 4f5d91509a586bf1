/* What the files of this room share: the module's state and the shape of its objects.
 * Must not enter: anything that decides. Every number comes from tidegate.h; this room turns Python values into C ones and
 * back, and nothing else of csrc/ is included here.
 *
 * The Limited API of 3.11, so that one wheel serves every later interpreter with a GIL. A free-threaded build compiles
 * without it (setup.py). */
#ifndef TIDEGATE_EXT_H
#define TIDEGATE_EXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "tidegate.h"

/* What raises is put out of the way: a request runs through each line of code once, and each has to be fetched. */
#if defined(__GNUC__)
#define TGPY_COLD __attribute__((cold))
#define TGPY_HOT __attribute__((hot)) /* what every request runs through stands together in the program */
#else
#define TGPY_COLD
#define TGPY_HOT
#endif
PyAPI_FUNC(void) PyErr_SetString(PyObject *, const char *) TGPY_COLD;
PyAPI_FUNC(PyObject *) PyErr_Format(PyObject *, const char *, ...) TGPY_COLD;
PyAPI_FUNC(PyObject *) PyErr_NoMemory(void) TGPY_COLD;
PyAPI_FUNC(void) PyErr_Clear(void) TGPY_COLD;

/* Calls without a tuple of arguments (PEP 590): of the stable interface since 3.12, and the same before, where the headers do
 * not show it. */
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define TGPY_CALLED "__vectorcalloffset__"
typedef PyObject *tgpy_called(PyObject *callable, PyObject *const *args, size_t count, PyObject *names);
static inline Py_ssize_t
tgpy_count(size_t count)
{
    return (Py_ssize_t)(count & ~((size_t)1 << (8 * sizeof count - 1)));
}
/* tp_call of such a type, which holds its tgpy_called at this place: for callers with a tuple. */
PyObject *tgpy_call_with_tuple(PyObject *callable, tgpy_called *called, PyObject *args, PyObject *kwargs);

/* ---- names looked up in dictionaries and keyword arguments: interned once, compared by pointer ---- */

#define TGPY_NAMES(X)                                                                                                  \
    X(cost) X(dims) X(route) X(user) X(prior) X(plan) X(body) X(reads_body) X(keys) X(tidegate_settle)                                            \
    X(tidegate) X(router) X(_tidegate_ready) X(fastapi) X(effective_route_context) X(original_route) X(starlette_route) \
    X(conn) X(response) X(scope) X(_called) X(_otherwise)                                                              \
    X(type) X(http) X(websocket) X(method) X(path) X(raw_path) X(query_string) X(headers) X(client)                    \
    X(is_authenticated) X(identity) X(display_name)                                                                    \
    X(REQUEST_METHOD) X(RAW_URI) X(REQUEST_URI) X(SCRIPT_NAME) X(PATH_INFO) X(REMOTE_ADDR) X(REMOTE_USER)              \
    X(add_reader) X(remove_reader) X(add_writer) X(remove_writer) X(call_later) X(call_soon) X(create_future)            \
    X(set_result) X(set_exception)                                                                                     \
    X(HTTP_HOST) X(SERVER_NAME) X(QUERY_STRING) X(CONTENT_TYPE) X(CONTENT_LENGTH)

typedef enum tgpy_name {
#define TGPY_NAME_ENUM(name) NAME_##name,
    TGPY_NAMES(TGPY_NAME_ENUM)
#undef TGPY_NAME_ENUM
    NAME_proxy_fix, /* "werkzeug.proxy_fix.orig" is no C word */
    TGPY_NAME_COUNT
} tgpy_name;

#define TGPY_FREE_MAX 64          /* decisions kept for the next hit */
#define TGPY_FREE_BLOCK_BYTES 384 /* one rule and one identity of common length, or two rules */
#define TGPY_FIELD_NAMES_MAX 16

#define TGPY_PAIRS_MAX 4
#define TGPY_PAIR_VALUE_MAX 24

/* The field that last went out in this place of an answer. Most values are those of the request before. */
typedef struct tgpy_pair {
    const char *name; /* a constant of the core: compared by address */
    PyObject *lower;  /* bytes */
    size_t length;    /* of the value */
    char value[TGPY_PAIR_VALUE_MAX];
} tgpy_pair;

typedef struct tgpy_loop tgpy_loop; /* async.c: the client of one event loop and one remote store */

typedef struct tgpy_state {
    PyTypeObject *clock_type, *rule_result_type, *decision_type, *limiter_type, *judgement_type, *gate_type, *ready_type;
    PyTypeObject *answers_type, *sender_type, *hit_type, *dependency_type, *loop_type, *watcher_type, *hold_type;
    PyObject *error, *rule_error, *config_error, *store_error, *identity_error;
    PyObject *names[TGPY_NAME_COUNT];
    /* Names of answer fields as bytes objects, lower-case; filled as they are met. */
    PyObject *field_names[TGPY_FIELD_NAMES_MAX];
    size_t field_name_count;
    tgpy_pair pairs[TGPY_PAIRS_MAX];
    PyObject *fields; /* the list of those pairs, for as long as answers have as many; NULL: none yet */
    unsigned turn;    /* of the answers that use it */
    PyObject *opening, *body; /* the types of the messages that went out last: servers and frameworks send one constant */
    unsigned routes;  /* counts up when a table of routes is made: see tgpy_routes_changed */
    bool outcomes;    /* somebody is told what is answered: see tgpy_tell_outcomes */
    void *free_blocks[TGPY_FREE_MAX];
    size_t free_count;
    void *free_judgements[TGPY_FREE_MAX];
    size_t free_judgement_count;
    PyObject *get_running_loop; /* asyncio's; NULL until somebody has imported that */
    tgpy_loop *loops;           /* the clients that are open */
    unsigned looks;             /* at whether their loops are closed */
    bool logging;           /* a handler that asks a limiter does not log into itself */
    bool said_resolved;     /* the line about a server that resolves the client has been said */
    PyObject *default_clock; /* of what names none: tests; else NULL */
    bool off;               /* everything is let through and nothing asked: tests */
} tgpy_state;

/* ---- objects. None of them can hold an object of the caller's, so no cycle can pass through them and none is tracked by
 * the collector: a decision costs 16 bytes and a list operation less. Each instance keeps its type alive, the type keeps
 * the module alive, so `state` is valid as long as the instance. ---- */

typedef struct tgpy_clock {
    PyObject_HEAD
    tgpy_state *state;
    tg_clock *clock;
} tgpy_clock;

typedef struct tgpy_rule_result {
    PyObject_HEAD
    tg_result result;
} tgpy_rule_result;

/* What is used of a tg_decision. `results` is followed by the identities, each its length (16 bits) and its bytes: a
 * tg_decision has room for the largest and weighs 5 KiB. */
typedef struct tgpy_decision {
    PyObject_VAR_HEAD /* ob_size: bytes from `results` on */
    tgpy_state *state;
    PyObject *owner; /* the Limiter or Gate whose store was asked; NULL: none was */
    uint64_t limit, burst, remaining, retry_after_us, reset_after_us, delay_us;
    bool allowed, degraded, overflow;
    uint8_t reported, result_count, identity_count;
    tg_result results[];
} tgpy_decision;

typedef struct tgpy_limiter {
    PyObject_HEAD
    tgpy_state *state;
    tg_limiter *limiter; /* NULL: switched off */
    tg_client *client;   /* NULL: the gate's */
    tg_gate *gate;       /* the rules file of a policy */
    bool composes;       /* by `by`: takes values by kind */
    bool manual;         /* under a ManualClock */
    PyObject *name;      /* str */
    PyObject *rules;     /* tuple of str */
    PyObject *off;       /* the one answer of a limiter that is switched off */
} tgpy_limiter;

typedef struct tgpy_gate {
    PyObject_HEAD
    tgpy_state *state;
    tg_gate *gate; /* NULL: switched off */
    uint64_t looked; /* the generation that the two below speak of */
    bool names_route, names_user;
} tgpy_gate;

/* Around a call into the library that asks a store, and touches only what the caller holds. A table answers sooner than
 * the interpreter's lock is let go and taken again; a network does not, and other threads run meanwhile. */
static inline PyThreadState *
tgpy_others_run(const tg_store *store)
{
    return store && tg_store_remote(store) ? PyEval_SaveThread() : NULL;
}

static inline void
tgpy_others_stop(PyThreadState *thread)
{
    if (thread)
        PyEval_RestoreThread(thread);
}

/* The same for a decision, the one call that is worth it: the lock is let go where a store begins to wait, if it tells, with
 * the question on its way already. *thread is the caller's, for both. */
static inline void
tgpy_let_go(void *thread)
{
    *(PyThreadState **)thread = PyEval_SaveThread();
}

static inline void
tgpy_others_run_meanwhile(const tg_store *store, PyThreadState **thread)
{
    *thread = NULL;
    if (store && tg_store_remote(store) && !tg_store_before_waiting(store, tgpy_let_go, thread))
        tgpy_let_go(thread);
}

static inline void
tgpy_others_stop_meanwhile(const tg_store *store, PyThreadState **thread)
{
    if (store && tg_store_remote(store))
        tg_store_before_waiting(store, NULL, NULL);
    tgpy_others_stop(*thread);
}

typedef struct tgpy_judgement {
    PyObject_HEAD
    tgpy_state *state;
    tgpy_decision *decision; /* never NULL */
    tg_outcome outcome;
    int status;
    bool challenged, shadow_denied, needs_body, settles;
    uint64_t waited_us; /* as in tg_judgement */
    PyObject *settles_at; /* the gate, where `settles` is set: a decision of nothing has no owner */
    uint8_t watch_count;
    uint32_t watches[TG_LIMITERS_MAX];
    bool answered;     /* `answer` is what the rules file made of it; else the limiter's own is made when asked for */
    tg_answer *answer; /* allocated, its storage only as long as it is used; NULL with `answered`: no fields, no body */
    char policy[TG_NAME_BYTES_MAX + 1];
    char missing[TG_NAME_BYTES_MAX + 1];
    char shadow_policy[TG_NAME_BYTES_MAX + 1];
} tgpy_judgement;

/* Of the module that the type is of, or the nearest it is derived from. */
tgpy_state *tgpy_state_of_type(PyTypeObject *type);

/* ---- errors.c ---- */

int tgpy_errors_init(PyObject *module, tgpy_state *state);
/* Raises what `error` says and returns NULL. `rule_text` (may be NULL): where a caret is drawn. */
PyObject *tgpy_raise(tgpy_state *state, const tg_error *error, PyObject *rule_text) TGPY_COLD;
/* __reduce__ of what lives in one process only. */
PyObject *tgpy_not_picklable(PyObject *self, PyObject *unused);

/* Queued notices go to the logger "tidegate". Never raises, keeps an exception that is on its way. */
void tgpy_log_notices_now(tgpy_state *state) TGPY_COLD;
void tgpy_log_warning(tgpy_state *state, const char *code, const char *message) TGPY_COLD;
static inline void
tgpy_log_notices(tgpy_state *state)
{
    if (tg_notice_pending())
        tgpy_log_notices_now(state);
}
PyObject *tgpy_take_notices(PyObject *module, PyObject *unused);

/* ---- text.c ---- */

/* The bytes of a str (UTF-8) or bytes object, borrowed from it. A lone surrogate, which UTF-8 has no place for, is written
 * as its three bytes: the object that holds those is then put into *made (else NULL), for the caller to release.
 * false: neither str nor bytes, no exception set; or out of memory, set. */
bool tgpy_text(PyObject *object, tg_text *text, PyObject **made);
/* The same for an argument that must be a str; None gives the empty text. Raises TypeError naming the argument. */
bool tgpy_text_argument(PyObject *object, const char *name, tg_text *text, PyObject **made);
/* A path argument as str: str, bytes or os.PathLike; NULL and None give None. A new reference, or NULL and raised. */
PyObject *tgpy_path(PyObject *object);
/* A list or tuple as it is, another sequence as a tuple. A new reference, or NULL and TypeError naming the argument. */
PyObject *tgpy_sequence(PyObject *object, const char *expected);
/* From core texts, which may hold any bytes. */
PyObject *tgpy_str(tg_text text);

/* A cost: an int of 0..TG_LIMIT_MAX. Raises TypeError or ValueError. */
bool tgpy_cost(PyObject *object, uint64_t *cost);
/* Seconds to microseconds for a store's timeout. Raises. */
bool tgpy_timeout(double seconds, uint64_t *timeout_us);

/* ---- async.c: questions to a remote store from a coroutine ---- */

/* The client of the running loop, borrowed; NULL: no loop runs in this thread, or the store can only be waited for, or with an
 * exception set. For remote stores. */
tgpy_loop *tgpy_loop_of(tgpy_state *state, tg_store *store);
/* Before a call that waits for a network: warns where that holds up an event loop. false: the warning is an exception. */
bool tgpy_warn_in_loop(tgpy_state *state);
static inline bool
tgpy_may_block(tgpy_state *state, const tg_store *store)
{
    return !store || !tg_store_remote(store) || tgpy_warn_in_loop(state);
}
void tgpy_loops_end(tgpy_state *state);

/* Each gives an awaitable: of a Decision or None. What is borrowed is borrowed for the call. */
PyObject *tgpy_limiter_ask(tgpy_loop *loop, PyObject *limiter, tg_question question, const tg_dimension *dimensions,
                           size_t dimension_count, uint64_t cost, uint64_t patience_us);
PyObject *tgpy_decision_refund_later(tgpy_loop *loop, tgpy_decision *decision);
PyObject *tgpy_settle_later(tgpy_loop *loop, tgpy_judgement *judgement, int status, const tg_header *headers,
                            size_t header_count);

/* Earlier judgements of the request as the core wants them. Only those that charged something in this very store: equal
 * scopes of another store are other counts. */
typedef struct tgpy_prior {
    tg_decision *decisions; /* allocated: each has room for the largest */
    const tg_decision **pointers;
    size_t count;
} tgpy_prior;
void tgpy_prior_fini(tgpy_prior *prior);

/* Of a Judgement. By the gate, or by the Limiters; never both. Takes `prior` over, whatever happens. */
PyObject *tgpy_judge_later(tgpy_loop *loop, PyObject *owner, tg_gate *gate, PyObject *const *limiters, size_t limiter_count,
                           const tg_request *request, tgpy_prior *prior, uint64_t cost);
/* What is settled: marks it as settled and fills the core's; and how that has ended. */
void tgpy_judgement_settles(tgpy_judgement *self, tg_judgement *judgement);
void tgpy_judgement_settled(tgpy_judgement *self, const tg_judgement *judgement);

/* ---- one file per type ---- */

extern PyType_Spec tgpy_clock_spec, tgpy_rule_result_spec, tgpy_decision_spec, tgpy_limiter_spec, tgpy_judgement_spec,
    tgpy_gate_spec, tgpy_ready_spec, tgpy_answers_spec, tgpy_sender_spec, tgpy_hit_spec, tgpy_dependency_spec, tgpy_loop_spec,
    tgpy_watcher_spec, tgpy_hold_spec;

/* Copies what is used. `owner` may be NULL. */
PyObject *tgpy_decision_new(tgpy_state *state, PyObject *owner, const tg_decision *decision);
/* Allowed, and nothing was asked: switched off, or no policy speaks. `rules` (may be none) are what would have held. */
PyObject *tgpy_decision_unasked(tgpy_state *state, const tg_rule *rules, size_t rule_count);
/* The way back, into `decision`: only what is used is written. */
void tgpy_decision_restore(const tgpy_decision *self, tg_decision *decision);
void tgpy_decision_drop_blocks(tgpy_state *state);
void tgpy_judgement_drop_blocks(tgpy_state *state);
/* Free lists need the interpreter lock; without one (a free-threaded build) each block comes from the allocator. */
#ifdef Py_GIL_DISABLED
#define TGPY_KEEP_BLOCKS 0
#else
#define TGPY_KEEP_BLOCKS 1
#endif

/* `answer` may be NULL: the one that tg_answer_make gives. */
PyObject *tgpy_judgement_new(tgpy_state *state, PyObject *owner, const tg_judgement *judgement, const tg_answer *answer);
/* An awaitable that is done: `await` gives `value` without a turn of the loop. Steals the reference; NULL stays NULL. */
PyObject *tgpy_ready(tgpy_state *state, PyObject *value);

tg_store *tgpy_owner_store(tgpy_state *state, PyObject *owner);

/* TIDEGATE_ENABLED: 1 on, 0 off, -1 raised. */
int tgpy_enabled(tgpy_state *state);

/* ---- limiter.c, for the files beside it ---- */

typedef tg_status tgpy_asker(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                             void *what, tg_error *error);
/* Reads the arguments of a hit and calls `asker` with them, once; other threads may run meanwhile where the store is remote.
 * asked: false where the limiter is switched off, or all are (switch_off). false: raised. */
bool tgpy_limiter_with(PyObject *limiter, PyObject *const *args, Py_ssize_t count, PyObject *names, tgpy_asker *asker,
                       void *what, bool *asked);
/* The decision of one that was not asked: all is allowed. */
PyObject *tgpy_limiter_unasked(PyObject *limiter);
/* A hit with patience as an awaitable of the running loop. The limiter's store is remote. */
PyObject *tgpy_limiter_hit_later(PyObject *limiter, PyObject *const *args, Py_ssize_t count, PyObject *names,
                                 uint64_t patience_us);

/* ---- wait.c ---- */

PyObject *tgpy_limiter_wait(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_limiter_wait_async(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *tgpy_hit_within(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_hit_within_async(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_limiter_kind(PyObject *module, PyObject *limiter);

PyObject *tgpy_limiter_reserve(PyObject *self, PyObject *args, PyObject *kwargs);

/* ---- reservation.c ---- */

PyObject *tgpy_reserve(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);

/* ---- request.c ---- */

#define TGPY_HEADERS_INLINE 64
#define TGPY_HELD_MAX 16

/* A tg_request over the buffers of Python objects. What is borrowed from is held, so that nothing that runs meanwhile can
 * free it. */
typedef struct tgpy_request {
    tg_request request;
    /* For what is read late: see tgpy_request_of_scope. */
    tgpy_state *state;
    PyObject *dict, *late_headers; /* held */
    tg_header *headers; /* inlined or allocated */
    size_t header_room;
    PyObject *held[TGPY_HELD_MAX];
    size_t held_count;
    PyObject *overflow; /* list: what `held` has no room for */
    tg_part keys[TG_PARTS_MAX]; /* what the application says itself */
    char *path;         /* allocated when a decoded path had to be encoded again, else NULL */
    bool unjudged;      /* a scope that is no request: lifespan */
    tg_header inlined[TGPY_HEADERS_INLINE];
} tgpy_request;

/* Both false with an exception set; fini in any case. route and user may be NULL or None. */
bool tgpy_request_of_scope(tgpy_state *state, tgpy_request *request, PyObject *scope, PyObject *route, PyObject *user);
/* The same of a dict that is known to be a request, with a route whose text outlives it (empty: none), but for what stands in
 * `later` (TG_READ_ bits): that is read when the judging asks for it. What may run Python code is read at once; scope["user"]
 * where `user` says that it is wanted. For a judging that does not let other threads run; one that fails because of what was
 * read late has an exception set. */
bool tgpy_request_of_scope_late(tgpy_state *state, tgpy_request *request, PyObject *scope, tg_text route, bool user,
                                unsigned later);
bool tgpy_request_of_environ(tgpy_state *state, tgpy_request *request, PyObject *given, PyObject *route, PyObject *user);
/* A str as UTF-8 for as long as the request; `what` names it where it is none. */
bool tgpy_request_str(tgpy_request *request, PyObject *object, const char *what, tg_text *text);
void tgpy_request_fini(tgpy_request *request);

/* ---- judgement.c: the four judging calls ---- */

PyObject *tgpy_gate_judge_asgi_async(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_judge_asgi_async(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_gate_judge_asgi(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_gate_judge_wsgi(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_judge_asgi(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_refusal(PyObject *module, PyObject *decision);
PyObject *tgpy_judge_wsgi(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *tgpy_client_address(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* A field's name as ASGI wants it, lower-case; the same object each time. */
PyObject *tgpy_lower_name(tgpy_state *state, tg_text name);
PyObject *tgpy_judgement_fields(PyObject *judgement); /* as its attribute `fields` */
/* One Limiter or Gate judges what tgpy_request_of_scope_late has read. Its store is no remote one; prior is a list of
 * Judgement. */
PyObject *tgpy_judge_late(tgpy_state *state, PyObject *limiter_or_gate, tgpy_request *request, PyObject *prior, uint64_t cost);

/* ---- testing.c ---- */

PyObject *tgpy_use_clock(PyObject *module, PyObject *clock);
PyObject *tgpy_switch_off(PyObject *module, PyObject *off);
/* The clock of something that names none, or NULL. */
tg_clock *tgpy_default_clock(const tgpy_state *state);

/* ---- metrics.c ---- */

PyObject *tgpy_store_metrics(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* ---- explain.c ---- */

PyObject *tgpy_gate_explain_as(PyObject *self, PyObject *args, PyObject *kwargs);

/* ---- send.c ---- */

PyObject *tgpy_asgi_send(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* From now on senders look for scope["tidegate_settle"]. */
PyObject *tgpy_tell_outcomes(PyObject *module, PyObject *unused);
PyObject *tgpy_shown(PyObject *module, PyObject *judgements);
/* asgi_send() of checked arguments. scope: a dict, or NULL where nobody can charge by outcome */
PyObject *tgpy_bind_send(tgpy_state *state, PyObject *judgements, PyObject *send, PyObject *scope);

/* ---- asgi.c ---- */

/* Calls what asgi_hit() has made, or another callable. */
PyObject *tgpy_hit_scope(const tgpy_state *state, PyObject *hit, PyObject *scope);
PyObject *tgpy_asgi_hit(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *tgpy_asgi_enter(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* A template that a router's table has given holds until the next table is made, of whatever router. */
PyObject *tgpy_routes_changed(PyObject *module, PyObject *unused);

#endif
