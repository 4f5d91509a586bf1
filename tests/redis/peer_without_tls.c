/* What a build without OpenSSL says to rediss://: the one file that differs, compiled as that build does. */
#include "../../csrc/stores/redis/tls.c"

int
main(void)
{
    tg_error error = { .message = "" };
    const tg_status status = tg__tls_open(NULL, NULL, &error);
    printf("%d %s\n", status == TG_E_UNSUPPORTED && !tg__tls_available(), error.message);
    return 0;
}
