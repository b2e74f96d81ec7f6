//! `--metrics`: the endpoints for probes and scrapers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use common::rows::LEASE;
use common::{Running, World, line, until};
use rustix::process::Signal;

/// Returns status and body of a page, once the server answers.
fn get(address: &str, path: &str) -> (u16, String) {
    let mut stream = until("server", || TcpStream::connect(address).ok());
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn free_port() -> String {
    simba_servers::free_address().unwrap().to_string()
}

/// Runs on the default store, without a server.
fn embedded(world: &World, command: &[&str], address: &str, script: &str) -> Running {
    let mut simba = world.bare();
    simba.args(command).args(LEASE).args(["--metrics", address, "--", "sh", "-c", script]);
    world.start(simba)
}

/// Returns the value of a series that is not a part of a histogram.
fn value(scrape: &str, series: &str) -> Option<f64> {
    let line = scrape.lines().find(|line| line.starts_with(series))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

#[test]
fn leader_is_ready_and_waiter_is_live() {
    let world = World::new();
    let (first, second) = (free_port(), free_port());
    let leader = embedded(&world, &["lead", "m"], &first, "echo up > up; exec sleep 1000");
    line(&world.path("up"));
    assert_eq!(get(&first, "/ready"), (200, "leading\n".to_owned()));
    let waiter = embedded(&world, &["lead", "m"], &second, "echo up > next; exec sleep 1000");
    assert_eq!(get(&second, "/live").0, 200);
    assert_eq!(get(&second, "/ready"), (503, "not leading\n".to_owned()));
    let renewed = until("renewal", || {
        let (status, scrape) = get(&first, "/metrics");
        assert_eq!(status, 200);
        value(&scrape, "simba_renewal_seconds_count{backend=\"sqlite\"}").filter(|many| *many > 0.0)?;
        Some(scrape)
    });
    assert_eq!(value(&renewed, "simba_acquisitions_total{backend=\"sqlite\"}"), Some(1.0), "{renewed}");
    assert!(renewed.contains("simba_renewal_slack_seconds_bucket"), "{renewed}");
    leader.signal(Signal::TERM);
    leader.wait().expect(0);
    line(&world.path("next"));
    assert_eq!(get(&second, "/ready").0, 200);
    assert_eq!(get(&second, "/nothing").0, 404);
    waiter.signal(Signal::TERM);
    waiter.wait().expect(0);
}

#[test]
fn schedule_is_ready_while_it_leads() {
    let world = World::new();
    let address = free_port();
    let script = "echo up > up";
    let leader = embedded(&world, &["schedule", "m", "--every", "100ms"], &address, script);
    line(&world.path("up"));
    assert_eq!((get(&address, "/ready").0, get(&address, "/live").0), (200, 200));
    leader.signal(Signal::TERM);
    leader.wait().expect(0);
}

#[test]
fn address_in_use_is_reported_in_one_line_and_starts_nothing() {
    let world = World::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for command in [&["lead", "m"][..], &["schedule", "m", "--every", "1s"]] {
        let refused = embedded(&world, command, &address, "echo up > up").wait().expect(69);
        assert!(refused.err.contains(&address) && refused.err.lines().count() == 1, "{refused:?}");
    }
    assert!(!world.path("up").exists());
}
