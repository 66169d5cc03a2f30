//! By which way an exporter is reached, and that the bytes are right by each.

use cuda_ipc_core::importer::Route;
use cuda_ipc_tests::exporter::Remote;
use cuda_ipc_tests::snapshot::Snapshot;

use crate::support::{by, import, share};

#[test]
fn bytes_are_the_same_by_either_route() {
    let (me, importer) = enter!("bytes_are_the_same_by_either_route");
    let start = Snapshot::take(&importer.fake);
    for count in [1, 26, 400] {
        let mut remote = Remote::start(&me);
        // With an fd for each chunk, and with none.
        for reserve in [256, 1_u64 << 40] {
            let (memory, rkey) = share(&mut remote, &format!("reserve={reserve}"), count);
            assert_eq!(remote.stats().fds, if reserve == 256 { count } else { 0 });
            for (asked, taken) in [(Route::Auto, Route::Pidfd), (Route::Broker, Route::Broker)] {
                let (peer, imported) = import(&importer, &rkey, &by(asked)).unwrap();
                assert_eq!(peer.route(), taken);
                importer.verify_import(&imported, &rkey, &memory);
            }
        }
        remote.finish();
    }
    start.assert_unchanged(&importer.fake, "imports by the broker");
}
