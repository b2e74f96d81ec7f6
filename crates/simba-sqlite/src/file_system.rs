//! The file systems that may hold the file: an allow-list of those that belong to one machine. A file that two kernels
//! share would have two clocks and two owners.

use std::path::Path;

use simba_core::{Error, ErrorKind, Result};

use crate::machine;

/// The magic numbers of the file systems that only one kernel uses: ext2/ext3/ext4, xfs, btrfs, zfs, f2fs, bcachefs, jfs,
/// reiserfs, nilfs2, ubifs, tmpfs, ramfs, overlayfs.
const LOCAL: &[u64] = &[
    0xef53, 0x58465342, 0x9123683e, 0x2fc12fc1, 0xf2f52010, 0xca451a4e, 0x3153464a, 0x52654973, 0x3434,
    0x24051905, 0x01021994, 0x858458f6, 0x794c7630,
];

/// The names of common file systems that are refused. All that are not in [`LOCAL`] are refused, too.
const REFUSED: &[(u64, &str)] = &[
    (0x6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb3"),
    (0x517b, "smb"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "ceph"),
    (0x5346_414f, "afs"),
    (0x0bd0_0bd0, "lustre"),
    (0x0116_1970, "gfs2"),
    (0x7461_636f, "ocfs2"),
    (0x786f_4256, "vboxsf"),
    (0xbacb_acbc, "vmhgfs"),
    (0xf15f, "ecryptfs"),
    (0x4d44, "fat"),
    (0x2011_bab0, "exfat"),
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
];

/// Checks that a folder is on a local file system.
pub(crate) fn check(folder: &Path) -> Result<()> {
    let kind = machine::file_system(folder).map_err(|error| {
        let message = format!("cannot read the file system of {}: choose another folder", folder.display());
        Error::new(ErrorKind::Config, message).with_source(error)
    })?;
    verdict(kind).map_err(|name| {
        Error::new(
            ErrorKind::Config,
            format!(
                "{} is on the file system {name}, which is not known to belong to this machine alone: put \
                 the file on a local disk, or use a store with a server",
                folder.display()
            ),
        )
    })
}

/// Returns the name of the file system as the error if it is not local.
fn verdict(kind: u64) -> std::result::Result<(), String> {
    if LOCAL.contains(&kind) {
        return Ok(());
    }
    let known = REFUSED.iter().find(|(refused, _)| *refused == kind);
    Err(known.map_or_else(|| format!("{kind:#x}"), |(_, name)| format!("`{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_file_systems_are_local() {
        assert_eq!(verdict(0xef53), Ok(()));
        assert_eq!(verdict(0x6969), Err("`nfs`".into()));
        assert_eq!(verdict(0x6573_5546), Err("`fuse`".into()));
        assert_eq!(verdict(0x1234_5678), Err("0x12345678".into()), "unknown is refused");
    }

    #[test]
    fn no_file_system_is_on_both_lists() {
        for (kind, name) in REFUSED {
            assert!(!LOCAL.contains(kind), "{name}");
        }
    }

    #[test]
    fn proc_file_system_is_refused_by_its_name() {
        let error = check(Path::new("/proc")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("`proc`"), "{error}");
        assert!(check(&std::env::temp_dir()).is_ok());
    }
}
