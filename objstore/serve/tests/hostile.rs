//! Bytes that are no request, or too many of them: each is answered, and none ends the server.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpStream},
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};

use ripieno_serve::{Control, ControlAddress, control::Status};
use ripieno_testkit::WATCHDOG;

use crate::{
    control::{exchange, request, split},
    rig::{Raw, Rig},
};

#[test]
fn what_is_no_request_has_an_answer() {
    let rig = Rig::new();
    let long = "a".repeat(9 << 10);
    let many = "A: b\r\n".repeat(40);
    let keys = format!("{{\"namespace\": 0, \"keys\": [\"{}\"]}}", "0".repeat(63));
    let cases: [(String, u16); 17] = [
        ("GET / HTTP/1.1\r\n\r\n".into(), 404),
        ("GET /status HTTP/9.9\r\n\r\n".into(), 400),
        ("GET\r\n\r\n".into(), 400),
        ("GET /status HTTP/1.1\r\nno header\r\n\r\n".into(), 400),
        (format!("GET /{long} HTTP/1.1\r\n\r\n"), 431),
        (format!("GET /status HTTP/1.1\r\nA: {long}\r\n\r\n"), 431),
        (format!("GET /status HTTP/1.1\r\n{many}\r\n"), 431),
        ("POST /hints HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n".into(), 413),
        ("POST /hints HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n".into(), 413),
        ("POST /hints HTTP/1.1\r\nContent-Length: -1\r\n\r\n".into(), 400),
        ("POST /hints HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n".into(), 400),
        ("POST /hints HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".into(), 411),
        (request("POST", "/hints", "{"), 400),
        (request("POST", "/directory/lookup", &keys), 400),
        (request("DELETE", "/cache/pins/-1", ""), 404),
        (request("DELETE", "/cache/pins/99999999999999999999", ""), 404),
        (request("POST", "/status", ""), 405),
    ];
    for (text, expected) in &cases {
        let (status, head, body) = exchange(&rig.socket(), text.as_bytes());
        assert_eq!(status, *expected, "{text:.80}: {head}{body}");
        assert!(body.contains("\"kind\"") && head.contains("Connection: close"), "{head}{body}");
        let allow = head.contains("Allow: GET\r\n") || head.ends_with("Allow: GET");
        assert_eq!(allow, status == 405, "{head}");
    }
    assert_eq!(rig.status().refused_requests, cases.len() as u64);
}

#[test]
fn requests_follow_each_other_on_a_connection() {
    let rig = Rig::new();
    let mut stream = UnixStream::connect(rig.socket()).unwrap();
    let body = r#"{"namespace": 0, "keys": []}"#;
    let (first, rest) = body.split_at(9);
    // Two at once, the second in pieces, after the word of the server.
    let head = format!("Expect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len());
    write!(stream, "GET /status HTTP/1.1\r\n\r\nPOST /directory/lookup HTTP/1.1\r\n{head}")
        .unwrap();
    let mut answer = String::new();
    let mut read = |stream: &mut UnixStream, end: &str| {
        let mut piece = [0; 4096];
        while !answer.ends_with(end) {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "{answer}");
            answer += std::str::from_utf8(&piece[..count]).unwrap();
        }
    };
    read(&mut stream, "HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(first.as_bytes()).unwrap();
    thread::sleep(Duration::from_millis(5));
    stream.write_all(rest.as_bytes()).unwrap();
    read(&mut stream, "{\"blocks\":0}");
    stream.write_all(b"GET /status HTTP/1.0\r\n\r\n").unwrap();
    let mut last = String::new();
    stream.read_to_string(&mut last).unwrap();
    assert!(last.starts_with("HTTP/1.1 200 OK") && last.contains("Connection: close"), "{last}");
}

#[test]
fn a_slow_request_has_a_deadline() {
    let rig = Rig::new();
    let since = Instant::now();
    let mut stream = UnixStream::connect(rig.socket()).unwrap();
    stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    stream.write_all(b"GET /status HTTP/1.1\r\n").unwrap();
    let mut slow = stream.try_clone().unwrap();
    // A byte at a time, which no pause between two reads would notice.
    let trickle = thread::spawn(move || {
        while slow.write_all(b"a").is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    let mut answer = Vec::new();
    // The connection may be closed with bytes left.
    let _ = stream.read_to_end(&mut answer);
    assert_eq!(split(&answer).0, 408);
    assert!(since.elapsed().as_secs() >= 4, "{:?}", since.elapsed());
    trickle.join().unwrap();
}

#[test]
fn connections_over_a_port_have_a_limit() {
    let rig = Rig::reloading();
    let address = rig.http.unwrap();
    let known = |held: &mut Vec<TcpStream>| {
        let mut stream = TcpStream::connect(address).unwrap();
        let head = "GET /cache/pins HTTP/1.1\r\nAuthorization: Bearer a token of 16 bytes\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).unwrap();
        held.push(stream);
        begin == *b"HTTP/1.1 200"
    };
    let mut held = Vec::new();
    // Idle ones with the token stay for seconds: on a slow machine the first may have gone.
    let taken = (0..1000).take_while(|_| known(&mut held)).count();
    assert!((32..1000).contains(&taken), "{taken} connections");
    // The socket is not held up.
    rig.status();
}

#[test]
fn strangers_do_not_keep_the_token_out() {
    let rig = Rig::reloading();
    let address = rig.http.unwrap();
    let control = ControlAddress::Tcp(address, "a token of 16 bytes".to_owned());
    let mut silent = Vec::new();
    for _ in 0..10 {
        // More than there are places, none of which is given up.
        silent.extend((0..48).map(|_| TcpStream::connect(address).unwrap()));
        Control::new(control.clone()).get::<Status>("/status").unwrap();
    }
    assert!(rig.status().refused_requests >= 400);
}

#[test]
fn the_token_is_looked_at_before_a_body() {
    let rig = Rig::reloading();
    let mut stream = TcpStream::connect(rig.http.unwrap()).unwrap();
    // Nothing of the body is sent, and no word is waited for.
    let head = "POST /hints HTTP/1.1\r\nContent-Length: 4000000\r\nAuthorization: Bearer wrong\r\n";
    write!(stream, "{head}Expect: 100-continue\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(split(&answer).0, 401, "{}", String::from_utf8_lossy(&answer));
}

/// Pieces of requests, so that more than the first byte of them is read.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    let words = [
        "GET ",
        "POST ",
        "DELETE ",
        "/status",
        "/cache/pins",
        "/hints",
        " HTTP/1.1\r\n",
        "\r\n",
        "\r\n\r\n",
        "Content-Length: ",
        "7",
        "Connection: close\r\n",
        "Expect: 100-continue\r\n",
        "{\"namespace\":0,\"keys\":[]}",
        "Transfer-Encoding: chunked\r\n",
        ":",
        "\0",
    ];
    prop_oneof![
        3 => proptest::sample::select(words.to_vec()).prop_map(|it: &str| it.as_bytes().to_vec()),
        1 => vec(any::<u8>(), 0..20),
    ]
}

#[test]
fn any_bytes_are_survived() {
    let rig = Rig::new();
    let ask = |bytes: &[u8]| -> io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(rig.socket())?;
        stream.write_all(bytes)?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    };
    let requests = vec(piece(), 1..12).prop_map(|pieces| pieces.concat());
    let mut runner = TestRunner::new(Config { cases: 512, ..Config::default() });
    let run = runner.run(&requests, |bytes| {
        // A connection that is reset was closed with bytes left.
        if let Ok(answer) = ask(&bytes)
            && answer.starts_with(b"HTTP")
        {
            let text = String::from_utf8_lossy(&answer);
            let statuses =
                text.split("HTTP/1.1 ").skip(1).map(|it| it[..3].parse::<u16>().unwrap());
            for status in statuses {
                prop_assert!(status < 500 || status == 501, "{}", text);
            }
        }
        Ok(())
    });
    run.unwrap();
    rig.status();
    rig.close();
}

#[test]
fn any_message_of_a_session_is_survived() {
    let rig = Rig::new();
    // The number of a call, or none, and bytes that are its fields, or not.
    let messages = (0..32_u8, vec(any::<u8>(), 0..200));
    let mut runner = TestRunner::new(Config { cases: 512, ..Config::default() });
    let run = runner.run(&messages, |(call, fields)| {
        let mut bytes = (fields.len() as u32 + 1).to_le_bytes().to_vec();
        bytes.push(call);
        bytes.extend_from_slice(&fields);
        Raw::new(&rig).send(&bytes);
        Ok(())
    });
    run.unwrap();
    let status = rig.settled();
    assert_eq!((status.files_writing, status.files_referenced), (0, 0));
    assert!(status.refused_messages > 0);
    rig.close();
}
