"""Ways in which a configuration looks right and limits nothing, or something else than was meant.

Each is shown to be real on the server itself, by the one change that falls into it; that the recipe does not is held by
test_server_recipes.py, whose claims are made of the file as it stands.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fcgi_daemon import Daemon, wait_for, within
from fcgi_stack import EXAMPLES
from server_recipes import RECIPES, Recipe
from server_site import RULES, Site
from server_stack import Haproxy, Lighttpd, Running

Build = Callable[..., Site]


def recipe(name: str) -> Recipe:
    return next(each for each in RECIPES if each.name == name)


def unlimited(site: Site) -> bool:
    """What the rules deny to everybody is let through."""
    return bool(site.server.ask(site.recipe.canary)[0].status == 200)


def test_lighttpd_asks_nobody_where_mod_proxy_comes_first(build_site: Build) -> None:
    site = build_site(recipe("lighttpd authorizer"),
                      changes=(('"mod_fastcgi", "mod_proxy"', '"mod_proxy", "mod_fastcgi"'),))
    assert unlimited(site)
    site.stop()


def test_lighttpd_asks_nobody_where_check_local_is_on(build_site: Build) -> None:
    site = build_site(recipe("lighttpd authorizer"),
                      changes=(('"check-local" => "disable"', '"check-local" => "enable"'),))
    assert unlimited(site)
    site.stop()


def test_lighttpd_looks_for_a_file_where_the_authorizer_has_a_docroot(build_site: Build) -> None:
    site = build_site(recipe("lighttpd authorizer"),
                      changes=(('"check-local" =>', '"docroot" => "/srv/www", "check-local" =>'),))
    assert site.server.ask(site.recipe.path)[0].status == 404
    assert site.server.ask(site.recipe.canary)[0].status == 403
    site.stop()


def test_lighttpd_gives_a_second_host_its_share_and_not_the_failed_requests(build_site: Build) -> None:
    site = build_site(recipe("lighttpd relay"), changes=(
        ('"socket" => "/run/tidegate/php.sock",',
         '"socket" => "/run/php/php-fpm.sock" ), ( "socket" => "/run/tidegate/php.sock",'),))
    statuses = {site.server.ask(site.recipe.canary)[0].status for _ in range(10)}
    assert 200 in statuses
    site.stop()


def test_apache_never_asks_where_all_are_granted(build_site: Build) -> None:
    site = build_site(recipe("Apache authorizer"),
                      changes=(("Authoritative On", "Authoritative Off"), ("Require tidegate", "Require all granted")))
    assert unlimited(site)
    site.stop()


def test_apache_makes_a_500_of_a_refusal_that_is_not_authoritative(build_site: Build) -> None:
    site = build_site(recipe("Apache authorizer"), changes=(("Authoritative On", "Authoritative Off"),))
    assert site.server.ask(site.recipe.canary)[0].status == 500
    site.stop()


def test_caddy_without_method_get_feeds_the_body_to_the_limiter(build_site: Build) -> None:
    site = build_site(recipe("Caddy forward_auth"), changes=(("\t\t\tmethod GET\n", ""),), fail_open=False)
    assert site.server.ask(site.recipe.path)[0].status == 200
    assert site.server.ask(site.recipe.path, "POST", b"x" * 100_000)[0].status == 502
    site.stop()


def test_caddys_fail_duration_lets_a_client_that_hangs_up_switch_the_limiter_off(build_site: Build) -> None:
    site = build_site(recipe("Caddy relay"), changes=(("\t\tdial_timeout 1s\n", """
        to unix//run/php/php-fpm.sock
        lb_policy first
        fail_duration 2s
"""),))
    assert not unlimited(site)
    with socket.create_connection(("127.0.0.1", site.server.port), 5) as peer:
        peer.sendall(f"POST {site.recipe.path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nbegin".encode())
        time.sleep(0.2)
    wait_for(lambda: unlimited(site), 1.5, "unlimited")
    site.stop()


def test_php_takes_a_chunked_upload_for_an_empty_one_where_the_server_gives_it_no_length(build_site: Build) -> None:
    site = build_site(recipe("Apache relay"), changes=(("SetEnv proxy-sendcl 1\n", ""),))
    response, body = site.server.ask(site.recipe.path, "POST", iter([b"p" * 100_000] * 20))
    assert (response.status, json.loads(body)["length"]) == (200, 0)
    site.stop()


# ---- HAProxy as an HTTP endpoint of decisions


@pytest.fixture
def endpoint(build_site: Build) -> Callable[..., Site]:
    def build(fail_open: bool = True) -> Site:
        rules = "store: memory://\npolicies:\n  - {name: api, rules: 2/hour, by: 'header:x-key'}\n"
        return build_site(Recipe("HAProxy endpoint", Haproxy, "haproxy/endpoint.cfg",
                                 "unix:{folder}/l.sock,group={group},modes=answer,policies=api"), rules=rules,
                          fail_open=fail_open)

    return build


def test_haproxys_endpoint_tells_the_decision_for_the_key_that_was_asked_about(endpoint: Callable[..., Site]) -> None:
    site = endpoint()
    told = [site.server.ask("/decide", X_Key="k=1&x") for _ in range(3)]
    assert [response.status for response, _ in told] == [200, 200, 429]
    first = json.loads(told[0][1])
    assert (first["allowed"], first["policy"], first["remaining"]) == (True, "api", 1)
    assert site.server.ask("/decide", X_Key="k=2")[0].status == 200
    assert site.server.ask("/decide")[0].status == 401
    site.stop()


@pytest.mark.parametrize("fail_open, dead, hung", [(True, 200, 200), (False, 503, 504)])
def test_haproxys_endpoint_answers_for_a_limiter_that_is_gone_or_hangs(
    endpoint: Callable[..., Site], fail_open: bool, dead: int, hung: int
) -> None:
    site = endpoint(fail_open)
    site.limiter.signal(signal.SIGSTOP)
    with within(2):
        try:
            answer = site.server.ask("/decide", X_Key="k")
        except Exception as error:  # HAProxy 2.6 may hang up on who waits for a FastCGI server
            assert type(error).__name__ == "RemoteDisconnected"
        else:
            assert answer[0].status == hung
    site.limiter.signal(signal.SIGCONT)
    site.kill_limiter()
    response, body = site.server.ask("/decide", X_Key="k")
    assert response.status == dead
    if fail_open:
        assert json.loads(body)["degraded"] is True
    site.stop()


# ---- lighttpd starting the limiter itself


@pytest.mark.fault("R184")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_of_ours_outlives_the_daemon(start: Callable[..., Daemon], number: int) -> None:
    daemon = start(RULES, "--threads", "4")
    pid = daemon.process.pid
    for _ in range(3):  # and a successor that fails, whose process must not stay either
        daemon.rules.write_text("wrong: [")
        daemon.signal(signal.SIGUSR2)
        time.sleep(0.1)
    daemon.signal(number)
    daemon.wait()

    def kin() -> list[str]:
        address = daemon.address.removeprefix("unix:")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_text() if entry.name.isdigit() and int(entry.name) != pid else ""
                if address in command:
                    found.append(command)
            except OSError:
                continue
        return found

    with within(2):
        wait_for(lambda: not kin(), what="no process left")


@pytest.mark.fault("R185")
def test_a_limiter_killed_under_lighttpd_is_started_again_and_one_that_cannot_start_makes_nobody_spin(
    build_site: Build, program: Path
) -> None:
    own = Recipe("lighttpd bin-path", Lighttpd, "lighttpd/authorizer.conf", "unix:{folder}/spare.sock", fields=False)
    site = build_site(own, changes=((
        '"socket" => "/run/tidegate/tidegate.sock",',
        '"socket" => "/srv/www/own.sock", "max-procs" => 1, '
        f'"bin-path" => "{program} --config /srv/www/rules.yaml",'),), prepare=prepare_own)
    try:
        assert site.server.ask(own.canary)[0].status == 403
        pids = children(site.server)
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)
        # lighttpd looks once a second: one look finds it dead, and a request; the third at the latest has another there.
        with within(3.5):
            wait_for(lambda: site.server.ask(own.canary)[0].status == 403, what="a new limiter")
        assert children(site.server) != pids
        (site.folder / "www" / "rules.yaml").write_text("wrong: [")
        os.kill(children(site.server)[0], signal.SIGKILL)
        before = cpu_seconds(site.server.server.process.pid)
        time.sleep(2)
        assert cpu_seconds(site.server.server.process.pid) - before < 0.2
    finally:
        site.stop()


def prepare_own(folder: Path) -> None:
    (folder / "www" / "rules.yaml").write_text(RULES)
    os.chmod(folder / "www", 0o777)


def children(running: Running) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(running.server.process.pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")



def test_mod_fcgid_makes_a_401_of_every_refusal(build_site: Build, program: Path) -> None:
    module = Path("/usr/lib/apache2/modules/mod_fcgid.so")
    if not module.exists():
        pytest.skip("mod_fcgid is not installed")
    text = (EXAMPLES / "apache" / "authorizer.conf").read_text()
    asking = text[text.index("<Location"):]
    site = build_site(recipe("Apache authorizer"), prepare=prepare_own, changes=((asking, f"""
LoadModule fcgid_module {module}
FcgidIPCDir /srv/www
FcgidProcessTableFile /srv/www/table
<Location "/">
    FcgidAccessChecker "{program} --config /srv/www/rules.yaml"
    Require all granted
</Location>
"""),))
    assert site.server.ask(site.recipe.path)[0].status == 200, site.server.log()
    response, body = site.server.ask(site.recipe.canary)
    assert (response.status, b"FORBIDDEN" in body) == (401, False), site.server.log()
    site.stop()
