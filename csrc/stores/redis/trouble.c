/* What an error reply means for the call, for the connection and for the operator.
 * Must not enter: sockets. */
#include "stores/redis/redis.h"

#include <stdio.h>

static const struct {
    const char *code;
    tg_trouble trouble;
    const char *advice; /* what a person does about it */
} meanings[] = {
    { "LOADING", TG__TROUBLE_PAUSED, "it is reading its data set; it answers when that is done" },
    { "BUSY", TG__TROUBLE_PAUSED, "another script keeps it; SCRIPT KILL ends one that has not written" },
    { "MASTERDOWN", TG__TROUBLE_PAUSED, "it is a replica that has lost its master" },
    { "READONLY", TG__TROUBLE_PAUSED, "it is a replica; the next connection finds who is master now" },
    { "CLUSTERDOWN", TG__TROUBLE_PAUSED, "the cluster has lost a master" },
    { "TRYAGAIN", TG__TROUBLE_PAUSED, "the cluster is moving these keys" },
    { "OOM", TG__TROUBLE_REFUSED, "raise maxmemory, or give the limiter a Redis of its own" },
    { "NOREPLICAS", TG__TROUBLE_REFUSED, "min-replicas-to-write is not met" },
    { "MISCONF", TG__TROUBLE_REFUSED, "it cannot write its data set to disk and refuses writes until it can" },
    { "WRONGTYPE", TG__TROUBLE_REFUSED, "another program has written to a key of ours" },
    { "NOAUTH", TG__TROUBLE_SETUP, "it wants a password: redis://user:password@host" },
    { "WRONGPASS", TG__TROUBLE_SETUP, "check user and password of the store's URI" },
    { "NOPERM", TG__TROUBLE_SETUP, "see docs/redis.md for the least a user must be allowed" },
    { "MOVED", TG__TROUBLE_SETUP, "this is one node of a cluster: redis+cluster://" },
    { "ASK", TG__TROUBLE_SETUP, "this is one node of a cluster: redis+cluster://" },
    { "CROSSSLOT", TG__TROUBLE_SETUP, "this is one node of a cluster: redis+cluster://" },
    { "ERR max number of clients reached", TG__TROUBLE_PAUSED, "raise maxclients, or lower `connections` of the URI" },
    { "ERR This instance has cluster support disabled", TG__TROUBLE_SETUP, "it stands alone: redis://" },
    { "ERR invalid password", TG__TROUBLE_SETUP, "check the password of the store's URI" },
    { "ERR Client sent AUTH, but no password is set", TG__TROUBLE_SETUP, "leave the password out of the store's URI" },
    { "ERR AUTH <password> called without any password", TG__TROUBLE_SETUP,
      "leave the password out of the store's URI" },
    { "ERR DB index is out of range", TG__TROUBLE_SETUP, "the server has fewer databases" },
    { "ERR The user executing the script can't", TG__TROUBLE_SETUP,
      "see docs/redis.md for the least a user must be allowed" },
};

/* The code itself, not a longer word that begins with it. */
static bool
begins(const char *text, const char *code)
{
    const size_t length = strlen(code);
    return strncmp(text, code, length) == 0 && (text[length] == ' ' || text[length] == '\0' || text[length] == ',' ||
                                                 strchr(code, ' ') != NULL);
}

/* Before version 7 an error inside a script came wrapped: "ERR Error running script (call to f_<sha1>):
 * @user_script:12: -OOM command not allowed ...". */
static const char *
unwrap(const char *reply)
{
    if (strncmp(reply, "ERR Error running script", 24) != 0)
        return reply;
    const char *inner = strstr(reply, ": -");
    return inner ? inner + 3 : reply;
}

tg_trouble
tg__redis_trouble(const char *reply, char *explained, size_t explained_bytes)
{
    const char *text = unwrap(reply);
    char shown[160];
    tg__text_show(tg_text_of(text), shown, sizeof shown);
    for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
        if (begins(text, meanings[i].code)) {
            snprintf(explained, explained_bytes, "%s (%s)", shown, meanings[i].advice);
            return meanings[i].trouble;
        }
    snprintf(explained, explained_bytes, "%s", shown);
    return TG__TROUBLE_REFUSED;
}

bool
tg__redis_unknown_script(const char *reply)
{
    /* Proxies send the text under a code of their own. */
    return strncmp(reply, "NOSCRIPT", 8) == 0 || strstr(reply, "NOSCRIPT") != NULL ||
           strstr(reply, "No matching script") != NULL;
}
