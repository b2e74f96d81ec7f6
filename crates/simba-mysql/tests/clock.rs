//! Clocks that are set: of the zone, of the server and of the client.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;

use common::{SECOND, lead, ms, simba};
use mysql_async::prelude::Queryable;
use simba_core::{Contender, Contention, FencingToken, MutexName, MutexState, Simba, Tenure};
use simba_servers::Setup;
use simba_tck::rounds;
use simba_test_support::{set_server_clock, with_server_clock};
use tokio::time::{sleep, timeout};

/// Makes the server use the time in this file. MySQL takes a minute to start this way, so the rows about the
/// server's clock run on MariaDB only.
fn with_clock(setup: Setup, file: &Path) -> Setup {
    with_server_clock(setup, file, true)
}

/// Leads for some seconds around `time`, in seconds since 1970, at which the clocks of Los Angeles change.
/// `time` is the end of this hour in UTC.
async fn leads_through(time: u64, hour: u32) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    // A server takes long to start on a busy machine.
    set_server_clock(&file, time - 600);
    let setup = Setup::mariadb().with_zone("America/Los_Angeles").with_env("TZ", "UTC");
    let server = common::private(with_clock(setup, &file)).await;
    let simba = simba(&common::least_url(server.address())).await;
    let mutex = common::name("row42");
    let mut admin = common::admin(&server.url()).await;
    // No lease exists yet that a step of the clock could end.
    set_server_clock(&file, time - 30);
    let (_contention, tenure) = lead(&simba, &mutex).await;
    let hour_now = "SELECT HOUR(UTC_TIMESTAMP())";
    let before: u32 = admin.query_first(hour_now).await.unwrap().unwrap();
    assert_eq!(before, hour, "the clock of the server is set");
    let mut after = before;
    let total = u64::try_from(common::lease().total().as_millis()).unwrap();
    let left = "SELECT CAST(transition_at AS SIGNED) - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) \
                DIV 1000 FROM simba_mutex WHERE mutex = ?";
    timeout(90 * SECOND, async {
        let mut more = 20;
        while more > 0 {
            let left: i64 = admin.exec_first(left, (mutex.as_str(),)).await.unwrap().unwrap();
            assert!(left > 0 && left <= total as i64, "a lease keeps its length, not {left} ms");
            after = admin.query_first(hour_now).await.unwrap().unwrap();
            more -= i32::from(after != before);
            sleep(ms(100)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(after, hour + 1);
    assert_eq!(tenure.loss(), None, "a change of the local time ends no lease");
    simba.shutdown().await;
}

/// Row 42: the zone's clocks are set back, and an hour repeats.
#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_autumn_time_change_ends_no_tenure() {
    // 2026-11-01 09:00:00
    leads_through(1_793_523_600, 8).await;
}

/// Row 42: the zone's clocks are set forward, and an hour is missing.
#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_spring_time_change_ends_no_tenure() {
    // 2027-03-14 10:00:00
    leads_through(1_805_018_400, 9).await;
}

/// Records every tenure's token.
#[derive(Clone, Default)]
struct Tokens(std::sync::Arc<std::sync::Mutex<Vec<FencingToken>>>);

impl Contender for Tokens {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.0.lock().unwrap().push(tenure.token());
    }

    async fn on_released(&mut self, _: &Tenure, _: &MutexState) {}
}

impl Tokens {
    fn all(&self) -> Vec<FencingToken> {
        self.0.lock().unwrap().clone()
    }
}

/// Returns the first tenure of either contention that is renewed after the step.
async fn settled(contentions: [&Contention; 2]) -> Tenure {
    let led = async {
        loop {
            let tenure = tokio::select! {
                biased;
                tenure = contentions[0].acquired() => tenure.unwrap(),
                tenure = contentions[1].acquired() => tenure.unwrap(),
            };
            let deadline = tenure.deadline();
            common::until("it is renewed or lost", || {
                tenure.loss().is_some() || tenure.deadline() > deadline
            })
            .await;
            if tenure.is_held() {
                return tenure;
            }
        }
    };
    timeout(60 * SECOND, led).await.unwrap()
}

/// Row 43: the server's clock is set by an hour, forward and back. Every tenure has a token of its own, and
/// tokens still grow.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_a_step_of_the_server_s_clock_repeats_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let server = common::private(with_clock(Setup::mariadb(), &file)).await;
    let (one, two) = (
        simba(&common::least_url(server.address())).await,
        simba(&common::least_url(server.address())).await,
    );
    let (mutex, tokens) = (common::name("row43"), Tokens::default());
    let start = |simba: &Simba| {
        let contention = simba.contend(mutex.clone()).with_contender(tokens.clone());
        contention.start().unwrap();
        contention
    };
    let leader = start(&one);
    let tenure = timeout(20 * SECOND, leader.acquired()).await.unwrap().unwrap();
    let successor = start(&two);
    common::until("the successor sees the leader", || successor.owner().is_owner(tenure.contender())).await;
    let mut last = tenure.token();
    for round in 0..rounds() {
        for offset in ["+1h", "+0"] {
            let before = tokens.all();
            std::fs::write(&file, offset).unwrap();
            if offset == "+1h" {
                // Every lease has ended: a tenure that continues would be a fault of the test.
                common::until("another tenure begins", || tokens.all().len() > before.len()).await;
            }
            let other_tenure = async {
                loop {
                    let led = settled([&leader, &successor]).await;
                    // An old leader that has not noticed the end of its lease is not the one that leads now.
                    if offset == "+0" || led.token() != last {
                        return led;
                    }
                }
            };
            let led = timeout(60 * SECOND, other_tenure).await.unwrap();
            let began = led.token() != last || tokens.all().len() > before.len();
            assert!(!began || led.token() > last, "round {round}, {offset}: {} after {last}", led.token());
            // The old leader notices the step at its next renewal.
            common::until("one leads after the step", || leader.is_owner() != successor.is_owner()).await;
            last = led.token();
        }
    }
    one.shutdown().await;
    two.shutdown().await;
    let three = simba(&common::least_url(server.address())).await;
    let (_contention, next) = lead(&three, &mutex).await;
    assert!(next.token() > last);
    three.shutdown().await;
    let mut all = tokens.all();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count, "no two tenures have the same token");
}

const CHILD_ARGS: &str = "SIMBA_ROW_45";

/// The child process of row 45: leads while its wall clock jumps, and prints the result.
#[test]
#[ignore = "the child process of row 45"]
fn jumping_client() {
    let args = std::env::var(CHILD_ARGS).unwrap();
    let (address, mutex) = args.split_once(' ').unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let simba = simba(&common::least_url(address)).await;
        let (_contention, tenure) = lead(&simba, &MutexName::new(mutex).unwrap()).await;
        println!("leads");
        let (mut jumps, mut last) = (0, std::time::SystemTime::now());
        while jumps < 100 {
            sleep(ms(5)).await;
            let now = std::time::SystemTime::now();
            let moved = now.duration_since(last).unwrap_or_else(|error| error.duration());
            jumps += u32::from(moved > 60 * SECOND);
            last = now;
            assert_eq!(tenure.loss(), None, "a jump of the wall clock ends no tenure");
        }
        println!("jumped {jumps} times, still leads: {}", tenure.is_held());
        simba.shutdown().await;
    });
}

/// Row 45: the wall clock of the client jumps by an hour a hundred times. The tenure continues.
#[tokio::test(flavor = "multi_thread")]
async fn row_45_a_client_whose_wall_clock_jumps_stays_leader() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "jumping_client", "--ignored", "--nocapture"])
        .env(CHILD_ARGS, format!("{} {}", common::shared().await, common::name("row45")))
        .env("LD_PRELOAD", simba_servers::faketime_library(true))
        .env("FAKETIME_TIMESTAMP_FILE", &file)
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let jumping = tokio::spawn(async move {
        for offset in ["+1h", "+0", "-1h", "+0"].iter().cycle() {
            std::fs::write(&file, offset).unwrap();
            sleep(ms(40)).await;
        }
    });
    let output = timeout(120 * SECOND, child.wait_with_output()).await.unwrap().unwrap();
    jumping.abort();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("jumped 100 times, still leads: true"), "{stdout}");
}
