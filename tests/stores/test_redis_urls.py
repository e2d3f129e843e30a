"""Redis URLs and the clients opened from them."""

from __future__ import annotations

import pytest

from warmprefix_redis import connect, parse_redis_url


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("redis://host", "redis://host"),
        ("redis://user:secret@host:1/2?socket_timeout=3", "redis://user:secret@host:1/2?socket_timeout=3"),
        ("rediss://host", "rediss://host"),
        ("valkey://host/1", "redis://host/1"),
        ("valkeys://host", "rediss://host"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
def test_url_of_one_server_is_passed_to_redis_py(url: str, same: str) -> None:
    target = parse_redis_url(url)
    assert (target.kind, target.url) == ("redis", same)


def test_a_cluster_has_any_number_of_nodes() -> None:
    target = parse_redis_url("redis+cluster://user:p%40ss@one:7000,two,[::1]:7002?socket_timeout=3")
    assert target.kind == "cluster"
    assert target.nodes == (("one", 7000), ("two", 6379), ("::1", 7002))
    assert target.options == {"username": "user", "password": "p@ss", "socket_timeout": 3.0}


def test_sentinels_name_the_master_of_a_service() -> None:
    target = parse_redis_url("valkey+sentinel://:secret@one,two:26380/my%20service/3?sentinel_password=other")
    assert target.kind == "sentinel"
    assert target.nodes == (("one", 26379), ("two", 26380))
    assert target.service == "my service"
    assert target.options == {"password": "secret", "db": 3}
    assert target.sentinel_options == {"password": "other"}


@pytest.mark.parametrize("url", ["rediss+cluster://one", "valkeys+cluster://one"])
def test_cluster_url_with_tls(url: str) -> None:
    assert parse_redis_url(url).options == {"ssl": True}


def test_tls_applies_to_sentinels_too() -> None:
    target = parse_redis_url("rediss+sentinel://one/service")
    assert target.options["ssl"] is target.sentinel_options["ssl"] is True


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", r"url must begin with one of redis://, .*redis\+cluster://.*valkey://, got ''"),
        ("localhost:6379", r"url must begin with one of redis://, .*, got ''"),
        ("http://host", r"url must begin with one of redis://, .*, got 'http://'"),
        ("redis+ring://host", r"url must begin with one of redis://, .*, got 'redis\+ring://'"),
        ("redis://host/first", r"url's database must be a number, got 'first'"),
        ("redis://host?socket_timeout=soon", r"Invalid value for '?`?socket_timeout"),
        ("redis://host?decode_responses=true", r"url must not have the option decode_responses"),
        ("redis+cluster://host?decode_responses=true", r"url must not have the option decode_responses"),
        ("redis+cluster://host/1", r"url's database must be 0, the only one of a Cluster; got '1'"),
        ("redis+cluster://", r"url must list its hosts as host:port,host:port; got ''"),
        ("redis+cluster://one,,two", r"url must list its hosts as host:port,host:port; got ''"),
        ("redis+cluster://one:x", r"url must list its hosts as host:port,host:port; got 'one:x'"),
        ("redis+cluster://one:70000", r"url must list its hosts as host:port,host:port; got 'one:70000'"),
        ("redis+sentinel://one", r"url must name the Sentinels' service behind the hosts: redis\+sentinel://"),
        ("redis+sentinel://one/service/first", r"url's database must be a number, got 'first'"),
    ],
)
def test_bad_url_error_lists_what_is_allowed(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_redis_url(url)


@pytest.mark.parametrize("url", ["redis+cluster://user:secret@one:x", "redis+sentinel://user:secret@one", "x:secret@y"])
def test_errors_never_quote_a_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url must") as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:1",
        "rediss://host:1",
        "unix:///nowhere",
        "redis+sentinel://one,two/service",
        "rediss+sentinel://one/s",
    ],
)
async def test_clients_neither_retry_nor_connect_at_once(url: str) -> None:
    target = parse_redis_url(url)
    clients, async_clients = connect(target, 0.1), connect(target, 0.1, is_async=True)
    for client in clients + async_clients:
        options = client.get_connection_kwargs()
        assert options["retry"]._retries == 0
        assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.1, 0.1)
    for client in clients:
        client.close()
    for client in async_clients:
        await client.aclose()


def test_options_of_the_url_take_precedence() -> None:
    (client,) = connect(parse_redis_url("redis://host?socket_timeout=7"), 0.1)
    assert client.get_connection_kwargs()["socket_timeout"] == 7
    client.close()
