//! The doorbell of a file: a file beside it that whoever changes an owner writes to, and whoever waits watches.
//!
//! The journal itself would not do: SQLite writes it before a reader can see the change.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use crate::job::Job;

/// The shortest time between two looks that rings ask for: a busy neighbour must not keep us busy.
const LEAST_PAUSE: Duration = Duration::from_micros(500);

/// The bell of one file, as one handle sees it.
#[derive(Debug)]
pub(crate) struct Bell {
    of: PathBuf,
    path: PathBuf,
    file: Option<File>,
    watcher: Option<RecommendedWatcher>,
    ear: Arc<Ear>,
}

/// What the thread that watches shares with the worker.
#[derive(Debug, Default)]
struct Ear {
    /// A look was asked for and has not begun.
    asked: AtomicBool,
    /// How long to rest after a ring, in microseconds.
    pause: AtomicU64,
}

impl Bell {
    /// The bell beside this file; made at the first need.
    pub(crate) fn beside(path: &Path) -> Self {
        let mut name = path.as_os_str().to_owned();
        name.push("-bell");
        Self { of: path.to_owned(), path: name.into(), file: None, watcher: None, ear: Arc::default() }
    }

    /// Rings in every process that listens. Without a bell they find out by polling.
    pub(crate) fn ring(&mut self) {
        if let Err(error) = self.try_ring() {
            self.file = None;
            tracing::debug!(bell = %self.path.display(), %error, "the bell cannot be rung: others poll");
        }
    }

    fn try_ring(&mut self) -> io::Result<()> {
        self.file()?.write_all_at(b"!", 0)
    }

    /// The file, open: the one that has the name, since somebody may have tidied up.
    fn file(&mut self) -> io::Result<&File> {
        let stale = match &self.file {
            Some(file) => file.metadata()?.nlink() == 0,
            None => true,
        };
        if stale {
            // Who watched the old one hears nothing any more.
            (self.file, self.watcher) = (None, None);
            let opened = self.open()?;
            return Ok(self.file.insert(opened));
        }
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self) -> io::Result<File> {
        match OpenOptions::new().write(true).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.put_up(),
            opened => opened,
        }
    }

    /// Makes the bell, for those who may use the file: also if we are another user, such as root.
    fn put_up(&self) -> io::Result<File> {
        let file = std::fs::metadata(&self.of)?;
        let mode = file.mode() & 0o666;
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&self.path) {
            Ok(bell) => {
                // Whoever may not do this shares the file with nobody but its owner.
                let _ = bell.set_permissions(Permissions::from_mode(mode));
                let _ = fchown(&bell, Some(file.uid()), Some(file.gid()));
                Ok(bell)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                OpenOptions::new().write(true).open(&self.path)
            }
            Err(error) => Err(error),
        }
    }

    /// Lets every ring ask for a look from here on. Returns whether that is new: rings before it were missed.
    ///
    /// # Errors
    ///
    /// The system has no watch to give: too many are in use.
    pub(crate) fn listen(&mut self, jobs: &Sender<Job>) -> notify::Result<bool> {
        self.file().map_err(notify::Error::io)?;
        if self.watcher.is_some() {
            return Ok(false);
        }
        let (ear, jobs) = (Arc::clone(&self.ear), jobs.clone());
        ear.asked.store(false, Ordering::Release);
        let mut watcher = notify::recommended_watcher(move |event| ear.heard(&event, &jobs))?;
        watcher.watch(&self.path, RecursiveMode::NonRecursive)?;
        self.watcher = Some(watcher);
        Ok(true)
    }

    /// A look begins: what is rung from here on asks for another.
    pub(crate) fn answer(&self) {
        self.ear.asked.store(false, Ordering::Release);
    }

    /// A look took this long. Looking is not to take more than a quarter of the time.
    pub(crate) fn answered(&self, took: Duration) {
        let pause = u64::try_from((took * 3).as_micros()).unwrap_or(u64::MAX);
        self.ear.pause.store(pause, Ordering::Relaxed);
    }
}

impl Ear {
    /// On the thread of the watcher, which has nothing else to do: rings that come while it rests are one.
    fn heard(&self, event: &notify::Result<Event>, jobs: &Sender<Job>) {
        // Others open and close the file; that is no ring.
        if matches!(event, Ok(Event { kind: EventKind::Access(_), .. })) {
            return;
        }
        if !self.asked.swap(true, Ordering::AcqRel) && jobs.send(Job::Look).is_ok() {
            let pause = Duration::from_micros(self.pause.load(Ordering::Relaxed));
            thread::sleep(pause.max(LEAST_PAUSE));
        }
    }
}
