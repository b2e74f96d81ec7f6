//! Any input works as documented or is rejected with a typed error. Nothing panics.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::future::Future;
use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use simba_core::spi::ConnectUrl;
use simba_core::{
    ContenderId, ErrorKind, FencingToken, Lease, Locker, MemoryBackend, MutexName, Result, Schedule, Simba,
    SystemClock,
};
use tokio::time::timeout;
use world::{MUTEX, World, handle, lease, ms, secs};

const DAY: Duration = secs(24 * 3600);
const YEAR: Duration = secs(365 * 24 * 3600);
const NANO: Duration = Duration::from_nanos(1);

fn cases() -> ProptestConfig {
    ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() }
}

/// Runs on its own virtual time.
fn in_a_world<F: Future>(act: impl FnOnce(World) -> F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(async { act(World::new()).await })
}

/// Durations of every size, and those on both sides of every documented bound.
fn durations() -> impl Strategy<Value = Duration> {
    let bounds =
        [Duration::ZERO, NANO, ms(1), ms(4), ms(5), ms(20), secs(1), DAY, 366 * DAY, YEAR, Duration::MAX];
    let edges = bounds.into_iter().flat_map(|at| [at.saturating_sub(NANO), at, at.saturating_add(NANO)]);
    prop_oneof![
        2 => select(edges.collect::<Vec<_>>()),
        1 => any::<Duration>(),
        // Each number of digits has the same probability.
        4 => (0..64_u32, any::<u64>()).prop_map(|(bits, nanos)| Duration::from_nanos(nanos >> bits)),
        4 => (1..100_000_u64).prop_map(ms),
    ]
}

/// Returns whether it is an `Invalid` error whose message is printable.
fn is_invalid<T>(outcome: Result<T>) -> bool {
    outcome.is_err_and(|error| {
        let text = error.to_string();
        error.kind() == ErrorKind::Invalid && !text.is_empty() && !text.contains(char::is_control)
    })
}

// ===== leases =====

#[derive(Clone, Copy, Debug)]
enum Setter {
    RenewAt(Duration),
    Grace(Duration),
    Margin(Duration),
    Poll(Duration),
}

impl Setter {
    fn apply(self, lease: Lease) -> Result<Lease> {
        match self {
            Self::RenewAt(renew_at) => lease.with_renew_at(renew_at),
            Self::Grace(grace) => lease.with_grace(grace),
            Self::Margin(margin) => lease.with_margin(margin),
            Self::Poll(poll) => lease.with_poll(poll),
        }
    }
}

fn setters() -> impl Strategy<Value = Setter> {
    prop_oneof![
        durations().prop_map(Setter::RenewAt),
        durations().prop_map(Setter::Grace),
        durations().prop_map(Setter::Margin),
        durations().prop_map(Setter::Poll),
    ]
}

/// `ttl` and `transition` in any proportion.
fn windows() -> impl Strategy<Value = (Duration, Duration)> {
    prop_oneof![
        (durations(), durations()),
        (20..50_000_u64, 0..=100_u64).prop_map(|(ttl, percent)| (ms(ttl), ms(ttl * percent / 100))),
    ]
}

fn assert_valid(lease: &Lease) {
    let deadline = lease.total() - lease.margin();
    let expiring = deadline - lease.grace();
    assert_eq!(lease.total(), lease.ttl() + lease.transition());
    assert!(Duration::ZERO < lease.renew_at(), "{lease:?}");
    assert!(lease.renew_at() < expiring && lease.renew_at() < lease.ttl(), "{lease:?}");
    assert!(expiring < deadline, "{lease:?}");
    assert!(deadline < lease.total(), "{lease:?}");
    assert!((ms(1)..=YEAR).contains(&lease.poll()), "{lease:?}");
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn lease_is_valid_or_rejected_whatever_is_set_in_any_order(
        (ttl, transition) in windows(), forced in any::<bool>(), setters in vec(setters(), 0..8),
    ) {
        let make = if forced { Lease::forced } else { Lease::new };
        let made = make(ttl, transition);
        let total = ttl.checked_add(transition);
        let fits = ttl >= ms(20) && match forced {
            true => transition >= ms(4) && total.is_some_and(|total| total <= YEAR),
            false => transition >= ttl / 5 && total.is_some_and(|total| total <= DAY),
        };
        prop_assert_eq!(made.is_ok(), fits, "{:?} + {:?}, forced: {}", ttl, transition, forced);
        let Ok(mut lease) = made else {
            prop_assert!(is_invalid(made));
            return Ok(());
        };
        assert_valid(&lease);
        for setter in setters {
            match setter.apply(lease) {
                Ok(set) => {
                    lease = set;
                    assert_valid(&lease);
                }
                refused => prop_assert!(is_invalid(refused)),
            }
        }
        // An accepted lease works.
        let remaining = in_a_world(|world| async move {
            let guard = world.peer(1).simba.with_lease(lease).locker(MUTEX).lock().await.unwrap();
            let remaining = guard.remaining();
            guard.release().await.unwrap();
            remaining
        });
        prop_assert_eq!(remaining, lease.total() - lease.margin());
    }
}

// ===== names and ids =====

const NAME: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
const ID: &str = "abcdefghijklmnopqrstuvwxyz0123456789._:@-";

/// Valid texts, odd texts, and valid texts with one odd character in the middle.
fn texts() -> impl Strategy<Value = String> {
    let odd =
        ["", ".", "..", "...", "/", "a/b", "{", "}", "{}", "a b", " a", "a ", "\0", "a\n", "@", "a@", "@@"];
    let odd = odd.into_iter().map(String::from);
    let long = [1, 31, 32, 33, 65, 66, 67, 511, 512, 513, 100_000]
        .into_iter()
        .flat_map(|length| ["x", "é", "🦁", "@"].map(|text| text.repeat(length)));
    prop_oneof![
        3 => "[A-Za-z0-9._:-]{0,70}",
        3 => "[a-z0-9._:@-]{0,36}",
        2 => ("[a-z0-9._:-]{0,33}", any::<char>(), "[a-z0-9._:-]{0,33}")
            .prop_map(|(front, odd, back)| format!("{front}{odd}{back}")),
        2 => any::<String>(),
        1 => "\\PC{0,70}",
        1 => select(odd.chain(long).collect::<Vec<_>>()),
    ]
}

/// The documented rules of a name, implemented a second time.
fn is_name(text: &str) -> bool {
    let length = text.chars().count();
    let folder = text == "." || text == "..";
    length > 0 && length <= 66 && !folder && text.chars().all(|c| NAME.contains(c))
}

/// The documented rules of an id, implemented a second time.
fn is_id(text: &str) -> bool {
    let parts: Vec<&str> = text.split('@').collect();
    let doubled = parts.iter().skip(1).any(|part| part.is_empty());
    (1..=32).contains(&text.len()) && !doubled && text.chars().all(|c| ID.contains(c))
}

fn has_control(text: &str) -> bool {
    text.chars().any(|c| matches!(c, '\0'..='\x1f' | '\x7f'..='\u{9f}'))
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn row_60_name_is_accepted_or_rejected_as_documented_by_every_call(text in texts()) {
        let good = is_name(&text);
        let name = MutexName::new(&text);
        prop_assert_eq!(name.is_ok(), good);
        prop_assert_eq!(text.parse::<MutexName>().is_ok(), good);
        match name {
            Ok(name) => prop_assert_eq!(name.to_string(), text.clone()),
            refused => prop_assert!(is_invalid(refused)),
        }
        let legacy = (1..=66).contains(&text.chars().count()) && !has_control(&text);
        prop_assert_eq!(MutexName::legacy(&text).is_ok(), legacy);
        prop_assert!(legacy || is_invalid(MutexName::legacy(&text)));
        let doors = in_a_world(|world| async move {
            let simba = world.peer(1).simba;
            let tried = simba.locker(&text).try_lock().await.map(|guard| assert!(guard.unwrap().is_held()));
            let timed = simba.locker(text.as_str()).lock_timeout(secs(1)).await.map(drop);
            let led = simba.contend(&text).start();
            let seen = simba.observe(&text).map(drop);
            let every = Schedule::fixed_rate(secs(1)).unwrap();
            let ran = simba.scheduler(&text).start(every, |_| async { Ok::<(), std::fmt::Error>(()) });
            let doors = [tried, timed, led, seen, ran.map(drop)];
            simba.shutdown().await;
            doors
        });
        for door in doors {
            prop_assert_eq!(door.is_ok(), good);
            prop_assert!(good || is_invalid(door));
        }
    }

    #[test]
    fn id_is_accepted_or_rejected_as_documented(text in texts()) {
        let id = ContenderId::new(&text);
        prop_assert_eq!(id.is_ok(), is_id(&text));
        match id {
            Ok(id) => prop_assert_eq!(id.as_str(), text.as_str()),
            refused => prop_assert!(is_invalid(refused)),
        }
        let foreign = ContenderId::foreign(&text);
        prop_assert_eq!(foreign.is_ok(), (1..=512).contains(&text.len()) && !has_control(&text));
        match foreign {
            // Any content can be displayed and split into its parts.
            Ok(id) => {
                let parts = (id.host(), id.pid(), format!("{id} {id:?}"));
                prop_assert!(parts.0.is_none_or(|host| text.ends_with(host)));
                prop_assert!(parts.1.is_none_or(|_| text.contains('@')));
            }
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Protocol),
        }
    }

    #[test]
    fn token_displays_and_compares_like_its_number(one in any::<u64>(), other in any::<u64>()) {
        let (token, second) = (FencingToken::new(one), FencingToken::new(other));
        prop_assert_eq!(token.to_string(), one.to_string());
        prop_assert_eq!(format!("{token:>24}|{token:<24}|{token:024}"), format!("{one:>24}|{one:<24}|{one:024}"));
        prop_assert_eq!((token.get(), token.cmp(&second)), (one, one.cmp(&other)));
    }
}

// ===== holds and timeouts =====

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn holds_work_or_contradict_each_other(max in option::of(durations()), min in option::of(durations())) {
        let contradict = max.is_some_and(|max| max.is_zero() || max <= min.unwrap_or_default());
        let held = in_a_world(|world| async move {
            let simba = world.peer(1).simba;
            let locker = simba.locker(MUTEX);
            let locker = max.into_iter().fold(locker, Locker::with_max_hold);
            let locker = min.into_iter().fold(locker, Locker::with_min_hold);
            let held = locker.try_lock().await.map(|guard| {
                let guard = guard.unwrap();
                (guard.is_held(), guard.remaining())
            });
            // The guard is dropped; a shutdown ends the minimum hold.
            simba.shutdown().await;
            world.assert_empty().await;
            held
        });
        match held {
            Ok(held) => {
                prop_assert!(!contradict);
                let longest = lease().total() - lease().margin();
                prop_assert_eq!(held, (true, max.unwrap_or(Duration::MAX).min(longest)));
            }
            refused => prop_assert!(contradict && is_invalid(refused)),
        }
    }

    #[test]
    fn free_mutex_is_locked_with_any_timeout(
        limit in durations(), patience in option::of(durations()),
    ) {
        let outcome = in_a_world(|world| async move {
            let locker = world.peer(1).simba.locker(MUTEX);
            let locker = patience.into_iter().fold(locker, Locker::with_patience);
            locker.lock_timeout(limit).await.map(|guard| guard.is_held())
        });
        match outcome {
            Ok(held) => prop_assert!(held),
            Err(error) => prop_assert!(limit.is_zero() && error.kind() == ErrorKind::Timeout),
        }
    }

    #[test]
    fn held_mutex_is_awaited_for_exactly_the_timeout(limit in durations()) {
        let (outcome, waited) = in_a_world(|world| async move {
            let (one, two) = (world.peer(1), world.peer(2));
            let _guard = one.simba.locker(MUTEX).lock().await.unwrap();
            let rival = two.simba.locker(MUTEX);
            let begin = world.now();
            // A longer timeout still waits.
            let outcome = timeout(secs(3), rival.lock_timeout(limit)).await;
            (outcome, world.now() - begin)
        });
        match outcome {
            Ok(outcome) => {
                let error = outcome.unwrap_err();
                prop_assert!(error.kind() == ErrorKind::Timeout && error.holder().is_some());
                prop_assert!(waited >= limit && waited < limit + ms(1));
            }
            // The timers of virtual time have a resolution of a millisecond.
            Err(_) => prop_assert!(limit > secs(3) - ms(1)),
        }
    }

    #[test]
    fn any_initial_delay_and_cooldown_is_kept(delay in durations(), cooldown in durations()) {
        let dead_heat = |wait: Duration| wait > secs(5) - ms(1) && wait <= secs(5);
        prop_assume!(!dead_heat(delay) && !dead_heat(cooldown));
        let kept = in_a_world(|world| async move {
            let contention = world.peer(1).simba.contend(MUTEX).with_initial_delay(delay);
            contention.start().unwrap();
            let mut kept = Vec::new();
            let mut begin = world.now();
            while let (0..2, Ok(tenure)) = (kept.len(), timeout(secs(5), contention.acquired()).await) {
                let tenure = tenure.unwrap();
                kept.push(tenure.acquired_at() - begin);
                contention.step_down(cooldown);
                tenure.lost().await;
                begin = world.now();
            }
            contention.stop().await.unwrap();
            world.assert_empty().await;
            kept
        });
        // Delays of more than five seconds are not awaited here.
        let expected: Vec<_> = [delay, cooldown].into_iter().take_while(|wait| *wait < secs(5)).collect();
        prop_assert_eq!(kept.len(), expected.len(), "{:?}", kept);
        for (kept, expected) in kept.into_iter().zip(expected) {
            prop_assert!(kept >= expected && kept < expected + ms(1), "{:?} for {:?}", kept, expected);
        }
    }
}

/// The machine's timers accept the maximum times as well.
#[tokio::test]
async fn maximum_times_work_on_the_system_clock() {
    // Long enough for a stall of the machine.
    let long = Lease::new(secs(30), secs(20)).unwrap();
    let simba = handle(MemoryBackend::new(), 1, SystemClock).with_lease(long);
    let locker = simba.locker(MUTEX).with_max_hold(Duration::MAX).with_patience(Duration::MAX);
    let guard = locker.lock_timeout(Duration::MAX).await.unwrap();
    let rival = simba.locker(MUTEX);
    let waiting = timeout(ms(50), rival.lock_timeout(Duration::MAX)).await;
    assert!(waiting.is_err(), "{waiting:?}");
    guard.release().await.unwrap();
    let year = Lease::forced(YEAR - ms(5), ms(5)).unwrap();
    let guard = simba.with_lease(year).locker("year").lock().await.unwrap();
    assert!(guard.remaining() > 360 * DAY);
    guard.release().await.unwrap();
    simba.shutdown().await;
}

// ===== schedules =====

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn period_is_accepted_or_rejected_as_documented(period in durations(), delay in durations()) {
        for make in [Schedule::fixed_rate, Schedule::fixed_delay] {
            let made = make(period);
            prop_assert_eq!(made.is_ok(), (ms(1)..=366 * DAY).contains(&period));
            let Ok(schedule) = made else {
                prop_assert!(is_invalid(made));
                continue;
            };
            let delayed = schedule.with_initial_delay(delay);
            prop_assert_eq!(delayed.is_ok(), delay <= 366 * DAY);
            prop_assert!(delayed.is_ok() || is_invalid(delayed));
        }
    }
}

#[cfg(feature = "cron")]
mod cron {
    use super::*;

    /// Parts of cron expressions, and some that are not.
    const PIECES: &str = "* ? / - , # L W LW + 0 1 5 7 15 29 30 31 59 60 99 4294967296 JAN FEB MON sun */5 */0 \
                          1-5 5-1 1-5/2 1,2,3 5#2 5#L 7#6 15W @daily @hourly @reboot @ é \0 -1 */ // 1//2 2030";

    fn lines() -> impl Strategy<Value = String> {
        let piece = || select(PIECES.split_whitespace().collect::<Vec<_>>());
        let odd = move || vec(piece(), 1..3).prop_map(|pieces| pieces.concat());
        let plain = select("* 0 5 */15 1-5 1,3 L 29 2 MON".split(' ').map(String::from).collect::<Vec<_>>());
        prop_oneof![
            4 => vec(prop_oneof![3 => plain, 1 => odd()], 4..8).prop_map(|fields| fields.join(" ")),
            2 => vec(odd(), 0..8).prop_map(|fields| fields.join(" ")),
            1 => any::<String>(),
            1 => "[0-9*,/ #LW+@-]{0,40}",
            1 => (250..300_usize).prop_map(|length| "1,".repeat(length / 2) + "1 * * * *"),
        ]
    }

    fn zones() -> impl Strategy<Value = String> {
        let known = ["UTC", "utc", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Europe/"];
        let odd = ["", ".", "..", "/", "../../etc/passwd", "/etc/passwd", "Europe", "Nowhere/Town", "\0"];
        prop_oneof![
            select([&known[..], &odd[..]].concat()).prop_map(String::from),
            any::<String>(),
            "[A-Z][a-z]{0,8}/[A-Z][a-z_]{0,10}",
        ]
    }

    proptest! {
        #![proptest_config(cases())]

        #[test]
        fn any_text_is_a_cron_schedule_or_rejected(line in lines(), zone in zones(), delay in durations()) {
            match Schedule::cron(&line) {
                Ok(schedule) => {
                    let shown = format!("{schedule:?}");
                    prop_assert!(line.len() <= 256 && shown.len() < 4096, "{}", shown);
                    let moved = schedule.clone().with_time_zone(&zone);
                    prop_assert!(moved.is_ok() || is_invalid(moved));
                    let delayed = schedule.with_initial_delay(delay);
                    prop_assert!(is_invalid(delayed), "a cron schedule has no initial delay");
                }
                refused => prop_assert!(is_invalid(refused)),
            }
        }
    }

    #[test]
    fn valid_cron_expressions_are_accepted() {
        for line in ["* * * * *", "*/20 * * * * *", "30 2 * * MON-FRI", "0 0 29 2 *", "0 12 L * *", "@daily"]
        {
            let schedule = Schedule::cron(line).and_then(|schedule| schedule.with_time_zone("Europe/Berlin"));
            assert!(schedule.is_ok(), "{schedule:?}");
        }
    }

    #[test]
    fn only_cron_has_a_zone() {
        for make in [Schedule::fixed_rate, Schedule::fixed_delay] {
            assert!(is_invalid(make(secs(1)).unwrap().with_time_zone("UTC")));
        }
    }
}

// ===== URLs =====

/// Parts of URLs, and some that are not.
const URL: &str = "redis redis+sentinel memory sqlite POSTGRES ä : :// / // ? & = # % %2 %zz %00 %0a %ff %C3%A4 \
                   %40 @ @@ , ,, [ ] [::1] [::g] ::1 h h1 user pw localhost 127.0.0.1 :0 :1 :65535 :65536 :-1 \
                   :+1 password=x key a=b 🦁 .. . ~ \\ \" ' $(x)";

fn urls() -> impl Strategy<Value = String> {
    let blank = [" ", "\t", "\0", "\u{a0}"];
    let piece = || select(URL.split_whitespace().chain(blank).collect::<Vec<_>>());
    prop_oneof![
        3 => vec(piece(), 0..12).prop_map(|pieces| pieces.concat()),
        3 => vec(piece(), 0..8).prop_map(|pieces| format!("redis://{}", pieces.concat())),
        1 => any::<String>(),
        1 => "[a-z]{1,5}://[a-z0-9.:,@%/?&=\\[\\]-]{0,40}",
        1 => (4080..4110_usize).prop_map(|length| format!("sqlite:{}", "x".repeat(length - 7))),
    ]
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn any_text_is_a_url_or_rejected(text in urls()) {
        match text.parse::<ConnectUrl>() {
            Ok(url) => {
                prop_assert!(text.len() <= ConnectUrl::MAX_LEN);
                prop_assert!(url.hosts().iter().all(|host| !host.name.is_empty() && host.port != Some(0)));
                let shown = url.to_string();
                prop_assert!(!shown.contains(|c: char| c.is_control() || c.is_whitespace()), "{}", shown);
                prop_assert_eq!(format!("{url:?}"), format!("ConnectUrl({shown})"));
                // The `Display` is a URL again, with the same hosts.
                if shown.len() <= ConnectUrl::MAX_LEN {
                    let again: ConnectUrl = shown.parse().unwrap();
                    prop_assert_eq!(again.hosts(), url.hosts());
                    prop_assert_eq!((again.scheme(), again.user()), (url.scheme(), url.user()));
                    prop_assert_eq!(again.path(), url.path());
                }
            }
            refused => prop_assert!(is_invalid(refused)),
        }
        prop_assert_eq!(ConnectUrl::try_from(text.as_str()).is_ok(), text.parse::<ConnectUrl>().is_ok());
    }
}

/// A handle outside a runtime returns an error instead of panicking.
#[test]
fn outside_a_runtime_every_call_fails() {
    let simba = Simba::new(MemoryBackend::new());
    assert!(is_invalid(simba.contend(MUTEX).start()));
    assert!(is_invalid(simba.observe(MUTEX)));
    let every = Schedule::fixed_rate(secs(1)).unwrap();
    assert!(is_invalid(simba.scheduler(MUTEX).start(every, |_| async { Ok::<(), std::fmt::Error>(()) })));
    let locker = simba.locker(MUTEX);
    assert!(is_invalid(simba_core::blocking::wait(locker.try_lock())));
    assert!(is_invalid(simba_core::blocking::wait(locker.lock())));
}
