use std::time::Duration;

use ripieno_stack::MetricsAddress;

use super::*;

fn scrape(lines: &[(&str, f64)]) -> Scrape {
    let lines = lines.iter().map(|(name, value)| format!("ripieno_{name} {value}\n"));
    let body: String = lines.collect();
    Scrape::parse(&format!("HTTP/1.1 200 OK\r\n\r\n{body}# EOF\n")).expect("well-formed")
}

#[test]
fn rates_are_of_the_time_between_two_scrapes() {
    let device = |name: &str| format!("device_{name}{{device=\"0\"}}");
    let (read, depth) = (device("read_bytes_total"), device("queue_depth"));
    let wear = device("wear_percent");
    let of = |bytes, commands, hits| {
        scrape(&[
            ("healthy", 1.0),
            ("path_info{route=\"host\"}", 1.0),
            (&read, bytes),
            (&depth, 7.0),
            (&wear, 3.0),
            ("commands_total", commands),
            ("lookup_tokens_total", 2.0 * hits),
            ("hit_tokens_total", hits),
            ("load_wait_seconds_sum", commands / 1e3),
            ("load_seconds_sum", 2.0),
            ("compute_saved_seconds_count", 3.0),
            ("compute_saved_seconds_sum", 50.0),
            ("written_bytes_total", 1e9),
            ("capacity_blocks", 100.0),
            ("used_blocks", 25.0),
            ("block_bytes", 1e6),
            ("uptime_seconds", 8640.0),
        ])
    };
    let figures =
        Figures::new(&of(4e9, 100.0, 10.0), &of(5e9, 600.0, 30.0), Duration::from_secs(2));
    assert_eq!((figures.read_bytes_s, figures.commands_s), (5e8, 250.0));
    assert_eq!((figures.hit_rate, figures.hit_rate_now), (Some(0.5), Some(0.5)));
    assert_eq!(figures.devices[0].queue_depth, 7);
    assert_eq!(figures.devices[0].wear_percent, Some(3.0));
    let text = figures.text(&MetricsAddress::Unix("./m".into()));
    assert!(text.contains("written a day: 9.31 GiB, 100.0 times the capacity"), "{text}");
    assert!(text.contains("wear     3 % of dev 0, media errors: 0"), "{text}");
    assert_eq!(figures.waits[0].seconds, 0.25);
    assert_eq!(figures.worth.speedup, Some(25.0));
    assert_eq!(figures.worth.written_bytes_day, Some(1e10));
    assert_eq!(figures.worth.capacity_writes_day, Some(100.0));
    // The queues were made again, and count from 0.
    let restarted =
        Figures::new(&of(5e9, 600.0, 30.0), &of(1e9, 700.0, 30.0), Duration::from_secs(1));
    assert_eq!((restarted.read_bytes_s, restarted.hit_rate_now), (1e9, None));
}

#[test]
fn lines_fit_60_columns_also_with_large_figures() {
    let mut samples = vec![("healthy".to_owned(), 1.0)];
    let count = |name: &str| match name {
        name if name.ends_with("_bytes") => 9.9e14,
        name if name.contains("errors") => 99_999.0,
        _ => 9.9e8,
    };
    for metric in ripieno_stack::METRICS {
        let name = metric.name;
        match metric.kind.name() {
            "counter" if name.starts_with("device_") => samples.extend(
                (0..20).map(|at| (format!("{name}_total{{device=\"{at}\"}}"), count(name))),
            ),
            "gauge" if name.starts_with("device_") => samples
                .extend((0..20).map(|device| (format!("{name}{{device=\"{device}\"}}"), 1023.0))),
            "counter" => samples.push((format!("{name}_total"), count(name))),
            "histogram" => {
                samples.push((format!("{name}_sum"), 64.0));
                samples.push((format!("{name}_count"), 1e9));
            }
            _ if name != "healthy" => samples.push((name.to_owned(), 9e6)),
            _ => {}
        }
    }
    let samples: Vec<_> = samples.iter().map(|(name, value)| (&**name, *value)).collect();
    let (before, now) = (scrape(&[("healthy", 1.0)]), scrape(&samples));
    let address = MetricsAddress::Unix(format!("/{}", "long/".repeat(30)).into());
    let text = Figures::new(&before, &now, Duration::from_secs(1)).text(&address);
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    assert!(text.contains("and 12 more devices"), "{text}");
}

#[test]
fn a_store_that_takes_no_writes_is_shown_with_its_loads() {
    let loads = [("healthy", 0.0), ("path_info{route=\"host\"}", 1.0), ("uptime_seconds", 60.0)];
    let address = MetricsAddress::Unix("/metrics".into());
    let text = |of: &[(&str, f64)]| {
        Figures::new(&scrape(of), &scrape(of), Duration::from_secs(1)).text(&address)
    };
    let (reading, closed) = (text(&loads), text(&loads[..1]));
    assert!(reading.contains("takes no writes") && reading.contains("host, open for 0:01:00"));
    assert!(reading.contains("written a day: not known in the first hour"), "{reading}");
    assert!(closed.contains("failed or closed") && !closed.contains("open for"), "{closed}");
}

#[test]
fn a_reader_names_a_port_a_host_or_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("sock");
    std::fs::write(&socket, "").unwrap();
    for (text, wanted) in [
        ("9400", "127.0.0.1:9400"),
        ("localhost:9400", "127.0.0.1:9400"),
        ("http://localhost:9400/metrics", "127.0.0.1:9400"),
        ("10.0.0.7:9400", "10.0.0.7:9400"),
        ("public:0.0.0.0:9400", "0.0.0.0:9400"),
        (socket.to_str().unwrap(), socket.to_str().unwrap()),
        ("Cargo.toml", "Cargo.toml"),
    ] {
        assert_eq!(address(text).map(|it| it.to_string()), Ok(wanted.to_owned()), "{text}");
    }
    assert!(address("nowhere").unwrap_err().contains("is no address"));
}

#[test]
fn answers_of_others_are_refused() {
    let whole = "HTTP/1.1 200 OK\r\n\r\nripieno_healthy 0\n# EOF\n";
    assert!(Scrape::parse(whole).is_some());
    for answer in [
        "",
        "HTTP/1.1 200 OK\r\n\r\n# EOF\n",
        "HTTP/1.1 200 OK\r\n\r\nripieno_healthy 0\n",
        "HTTP/1.1 500 Error\r\n\r\nripieno_healthy 0\n# EOF\n",
        "HTTP/1.1 200 OK\r\n\r\nripieno_healthy 0\nnode_load1 0.2\n# EOF\n",
    ] {
        assert!(Scrape::parse(answer).is_none(), "{answer}");
    }
}
