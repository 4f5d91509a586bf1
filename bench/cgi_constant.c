/* The yardstick of tidegate-cgi: a CGI program in C that always says the same, built as anybody would. */
#include <stdio.h>

int
main(void)
{
    return puts("Content-Type: application/json\r\n\r\n{\"allowed\": true}") < 0;
}
