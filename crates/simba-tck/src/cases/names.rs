//! One name means one mutex.

use simba_core::{ErrorKind, MutexName};

use crate::Fixture;
use crate::world::{Peer, assert_ok, lease_limit, lock, name, release, soon, within};

/// Every name that the documentation allows works.
pub async fn documented_names_work(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let longest = "x".repeat(MutexName::MAX_LEN);
    let mut names: Vec<_> = ["a", "A", "0", "-", "_", ":", "...", ".a", "a.", ":a:", "a.b:c-d_e", "Ab0"]
        .map(|plain| MutexName::new(plain).unwrap())
        .into();
    names.push(MutexName::new(longest).unwrap());
    names.push(MutexName::new(format!("{0}.{0}:{0}-{0}_", &name().as_str()[4..])).unwrap());
    for mutex in names {
        // Other suites may run the same case on the same store.
        let locked = within(lease_limit(fixture), "a documented name works", one.locker(&mutex).lock()).await;
        let guard = assert_ok("a documented name works", locked);
        assert!(two.try_lock(&mutex).await.is_none(), "broken: `{mutex}` is one mutex for all contenders");
        release(guard).await;
    }
}

/// A legacy name works like any other, or is refused with an error kind that the caller can handle.
pub async fn odd_names_work_or_are_refused(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    for odd in ["a b", "a/b", "{a}", "a@@b", "a%b", "a'b", "a\"b", "a\\b", "*", "ä", "日本", "🦁", "$a", "#a"]
    {
        let mutex = MutexName::legacy(format!("{odd}{}", name())).unwrap();
        match soon("an odd name is accepted or refused", one.locker(&mutex).lock()).await {
            Ok(guard) => {
                assert!(
                    two.try_lock(&mutex).await.is_none(),
                    "broken: `{mutex}` is one mutex for all contenders"
                );
                release(guard).await;
            }
            Err(error) => {
                let typed = matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Config);
                assert!(
                    typed,
                    "broken: `{mutex}` is refused as invalid or as a configuration error, not {error:?}"
                );
            }
        }
    }
}

/// An invalid name is an error of the first use, never a panic and never a mutex.
pub async fn wrong_names_are_refused(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let too_long = "x".repeat(MutexName::MAX_LEN + 1);
    for wrong in ["", ".", "..", "a/b", "a b", "a\0b", "ä", "{a}", &too_long] {
        let refusals = [
            soon("a wrong name is refused", peer.simba.locker(wrong).lock()).await.err(),
            peer.simba.contend(wrong).start().err(),
            peer.simba.observe(wrong).err(),
        ];
        for refusal in refusals {
            let kind = refusal.map(|error| error.kind());
            assert_eq!(kind, Some(ErrorKind::Invalid), "broken: {wrong:?} is refused as invalid");
        }
    }
}

/// Similar names are different mutexes: all can be held at once, and a release frees only one.
pub async fn names_are_independent(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let base = name();
    let alike = ["", ".", ":", "-", "_", "x", ".a", ":a", ":queue", ":fence", ":lock"];
    let mut names: Vec<_> = alike.map(|end| MutexName::new(format!("{base}{end}")).unwrap()).into();
    names.push(MutexName::new(format!("x{base}")).unwrap());
    let mut guards = Vec::new();
    for mutex in &names {
        guards.push(lock(&one.long_locker(mutex)).await);
    }
    while let Some(guard) = guards.pop() {
        let mutex = names.pop().unwrap();
        release(guard).await;
        let free = two.try_lock(&mutex).await;
        release(free.unwrap_or_else(|| panic!("broken: `{mutex}` is free once it is released"))).await;
        for held in &names {
            assert!(
                two.try_lock(held).await.is_none(),
                "broken: a release of `{mutex}` does not free `{held}`"
            );
        }
    }
}
