//! Round trips of every dword view, and of unknown values.
extern crate std;
use std::format;

use crate::{
    admin::*,
    cqe::Cqe,
    fdp::{IoManagementReceive, ManagementOperation},
    ids::*,
    nvm::{BlockRange, DatasetManagement, Directive, DirectiveType, NvmOpcode},
    prp::PrpEntry,
    reg::{self, Aqa, Cap, Cc, Csts, Version},
    sgl::{SglDescriptor, SglKind},
    sqe::{Psdt, Sqe},
    status::Status,
};

fn sqe() -> Sqe {
    Sqe::new(0, Cid(1), Nsid(1))
}

#[test]
fn the_command_set_is_found_among_the_descriptors() {
    use crate::identify::{CommandSet, NamespaceDescriptors};
    let list = |bytes: &[u8]| {
        let mut page = [0; 4096];
        page[..bytes.len()].copy_from_slice(bytes);
        NamespaceDescriptors(page)
    };
    assert_eq!(list(&[]).command_set(), CommandSet::NVM);
    let all = list(&[1, 2, 0, 0, 7, 8, 4, 1, 0, 0, 2]);
    assert_eq!(all.command_set(), CommandSet::ZONED);
    assert_eq!(all.find(1), Some(&[7u8, 8][..]));
    // Bytes behind the end of the list are none of it.
    assert_eq!(list(&[1, 0, 0, 0, 4, 1, 0, 0, 2]).command_set(), CommandSet::NVM);
    // Descriptors that fill the page, the last of which is cut off.
    let mut page = [0; 4096];
    page.chunks_mut(100).for_each(|chunk| (chunk[0], chunk[1]) = (1, 96));
    assert_eq!(NamespaceDescriptors(page).command_set(), CommandSet::NVM);
}

#[test]
fn register_fields_do_not_disturb_each_other() {
    let cap = Cap(u64::MAX).with_mqes_z(1023).with_to_500ms(20).with_dstrd(0).with_mpsmax(4);
    assert_eq!((cap.mqes_z(), cap.to_500ms(), cap.dstrd(), cap.mpsmax()), (1023, 20, 0, 4));
    assert_eq!((cap.mpsmin(), cap.css()), (15, 255));
    let cc = Cc(0).with_en(1).with_iosqes(6).with_iocqes(4).with_shn(2);
    assert_eq!(cc.0, 1 | 2 << 14 | 6 << 16 | 4 << 20);
    assert_eq!(Aqa(0).with_asqs_z(31).with_acqs_z(63).0, 31 | 63 << 16);
    assert!(Csts(reg::ALL_ONES).is_gone() && !Csts(1).is_gone());
    assert_eq!(Csts(0b1011).shst(), 2);
}

#[test]
fn versions_print_as_people_write_them() {
    assert_eq!(format!("{}", Version::new(1, 4, 0)), "1.4");
    assert_eq!(format!("{}", Version::new(1, 2, 1)), "1.2.1");
}

#[test]
fn the_spec_revision_lists_these_codes() {
    assert_eq!(format!("{}", Status::INVALID_FIELD), "00/02h Invalid Field in Command");
    assert_eq!(Status::UNRECOVERED_READ_ERROR.0, 0x281);
    assert_eq!(Status::LBA_OUT_OF_RANGE.with_dnr().code(), Status::LBA_OUT_OF_RANGE);
    assert!(Status(1 << 14).is_success());
    assert_eq!(format!("{}", Status::new(7, 0x42)), "07/42h unknown status");
}

#[test]
fn unknown_values_are_kept_and_printed() {
    assert_eq!(format!("{:?}", AdminOpcode(0xc1)), "AdminOpcode(0xc1)");
    assert_eq!(format!("{:?}", NvmOpcode(0x02)), "READ");
    assert_eq!(SglDescriptor { identifier: 0xf3, ..Default::default() }.kind(), SglKind(15));
}

#[test]
fn completions_carry_phase_beside_status() {
    let cqe = Cqe::new(7, 5, 3, Cid(0xbeef), Status::ABORTED_BY_REQUEST.with_dnr(), true);
    assert_eq!((cqe.phase(), cqe.cid(), cqe.sqhd, cqe.sqid), (true, Cid(0xbeef), 5, 3));
    assert_eq!(cqe.status(), Status::ABORTED_BY_REQUEST.with_dnr());
    assert_eq!(cqe.status_phase, 1 | 0x07 << 1 | 1 << 15);
}

#[test]
fn data_pointers_share_their_bytes() {
    let sgl = SglDescriptor::last_segment(0x1_2345_6780, 48);
    let entry = sqe().with_sgl(sgl);
    assert_eq!((entry.psdt(), entry.dptr.as_sgl()), (Psdt::SGL_MPTR_ADDRESS, sgl));
    assert_eq!(entry.dptr.prp1, 0x1_2345_6780);
    assert_eq!(entry.dptr.prp2, 48 | 0x30 << 56);
    assert_eq!(entry.with_prps(1, 2).psdt(), Psdt::PRP);
    assert_eq!((PrpEntry(0x12345).page(4096), PrpEntry(0x12345).offset(4096)), (0x12000, 0x345));
}

/// Writes `view` into an entry, reads it back and compares.
macro_rules! round_trip {
    ($($view:expr => $ty:ty),* $(,)?) => {$(
        let view: $ty = $view;
        let mut entry = sqe();
        view.write_to(&mut entry);
        assert_eq!(<$ty>::from_sqe(&entry), view);
    )*};
}

#[test]
fn dword_views_round_trip() {
    let qid = QueueId(0x1234);
    round_trip! {
        CreateIoCq { qid, qsize_z: 0xfedc, contiguous: true, interrupts: true, vector: 0x8001 }
            => CreateIoCq,
        CreateIoSq { qid, qsize_z: 0xfedc, contiguous: true, priority: 3, cqid: QueueId(0x8002) }
            => CreateIoSq,
        DeleteQueue { qid } => DeleteQueue,
        Abort { sqid: qid, cid: 0xabcd } => Abort,
        Identify { cns: Cns(0x1c), cntid: 0xff01, csi: 0x81 } => Identify,
        SetFeatures { fid: FeatureId::NUMBER_OF_QUEUES, save: true, value: 0xdead_beef }
            => SetFeatures,
        GetFeatures { fid: FeatureId(0xc0), select: FeatureSelect::SUPPORTED } => GetFeatures,
        GetLogPage {
            lid: LogPageId::SMART, lsp: 0x7f, rae: true, numd_z: 0x8765_4321, offset: u64::MAX - 3,
            lsi: 0x1234,
        } => GetLogPage,
        FormatNvm { lbaf: 0x3e, mset: 1, pi: 5, ses: 2 } => FormatNvm,
        BlockRange { slba: u64::MAX - 7, nlb_z: 0xffff, deac: true, fua: true, lr: false }
            => BlockRange,
        Directive { kind: DirectiveType::DATA_PLACEMENT, specific: 0x8001 } => Directive,
        IoManagementReceive { operation: ManagementOperation(0xff), specific: 0x8001, numd_z: !1 }
            => IoManagementReceive,
        DatasetManagement { nr_z: 255, deallocate: true } => DatasetManagement,
    }
    let mode = FdpMode { enabled: true, configuration: 0x81 };
    assert_eq!((FdpMode::from_dword(mode.to_dword()), mode.to_dword()), (mode, 0x8101));
    let event = AsyncEvent { kind: AsyncEventKind::SMART, info: 1, log_page: LogPageId::SMART };
    assert_eq!(AsyncEvent::from_dword(event.to_dword()), event);
    let queues = NumberOfQueues { nsq_z: 7, ncq_z: 0xffff };
    assert_eq!(NumberOfQueues::from_dword(queues.to_dword()), queues);
    let can = FeatureCapabilities { saveable: true, namespace_specific: false, changeable: true };
    assert_eq!(FeatureCapabilities::from_dword(can.to_dword()), can);
}

#[test]
fn block_ranges_refuse_what_the_field_cannot_hold() {
    assert!(BlockRange::new(Lba(0), Lbas(0)).is_none());
    assert!(BlockRange::new(Lba(0), Lbas(0x1_0001)).is_none());
    assert_eq!(BlockRange::new(Lba(9), Lbas(0x1_0000)).map(BlockRange::lbas), Some(Lbas(0x1_0000)));
}
